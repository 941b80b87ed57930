"""SwiGLU (arXiv 2002.05202) between an MLP's two products; for experts, rows are also multiplied by router weights."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.transformer.kernels import fused_kernels


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


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """Return silu(gate) * up * weight.

    Args:
        x: [R, 2 n]: gate, then up.
        weights: float32 [R].

    Returns:
        [R, n].
    """
    if _fused(x):
        from services.trainer.transformer.kernels.expert_kernels import weighted_swiglu_forward

        return weighted_swiglu_forward(x, weights)
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up * weights.unsqueeze(-1)).to(x.dtype)


def weighted_swiglu_backward(x: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of the weights, and the recomputed output.

    Args:
        x: [R, 2 n].
        weights: float32 [R].
        grad: [R, n], the output's gradient.

    Returns:
        [R, 2 n], float32 [R] and [R, n].
    """
    if _fused(x):
        from services.trainer.transformer.kernels.expert_kernels import weighted_swiglu_backward

        return weighted_swiglu_backward(x, weights, grad)
    (gate, up), weight = x.float().chunk(2, dim=-1), weights.unsqueeze(-1)
    sigmoid, grad = gate.sigmoid(), grad.float()
    activated = gate * sigmoid * up
    grad_weights = (grad * activated).sum(-1)
    grad = grad * weight
    grad_x = torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), -1)
    return grad_x.to(x.dtype), grad_weights, (activated * weight).to(x.dtype)


def _fused(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and fused_kernels()
