"""SwiGLU (arXiv 2002.05202) between the two products of an MLP."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.transformer.kernels.fusion import fused_kernels


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up for x = [gate, up]: [..., 2 n] -> [..., n]."""
    if x.dtype == torch.bfloat16 and fused_kernels():
        fused: Tensor = _SwiGLU.apply(x)
        return fused
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from services.trainer.transformer.kernels.layer_kernels import swiglu_forward

        x = x.contiguous()
        ctx.save_for_backward(x)
        return swiglu_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from services.trainer.transformer.kernels.layer_kernels import swiglu_backward

        return swiglu_backward(ctx.saved_tensors[0], grads[0])
