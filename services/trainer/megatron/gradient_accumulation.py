"""Weight gradients accumulated in float32 buffers, without an intermediate bf16 copy.

Megatron's own fusion needs apex for that; `replace_apex` lets it use torch.
"""

from typing import Any

import torch
from torch import Tensor


def writable(main_grad: Tensor) -> Tensor:
    """Return a parameter's gradient buffer. Allocate its memory first if a sharded buffer has none.

    Call it in the backward pass before gradients are added (`services.trainer.megatron.sharded_gradients`).
    """
    provide = getattr(main_grad, "provide", None)
    if provide is not None:
        provide()
    return main_grad


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left.T @ right to `total`, with float32 sums.

    Args:
        total: float32 [n, m].
        left: [k, n], any element type.
        right: [k, m], the same element type.
    """
    if len(left) == 0:  # an expert without tokens
        return
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:  # torch supports mixed types on CUDA only
        total.add_(left.t() @ right)


class _MatrixProducts:
    """Replaces apex's extension, which Megatron calls to add weight gradients to its gradient buffers."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add grad_output [tokens, out].T @ total_input [tokens, in] to main_grad [out, in]."""
        add_product_(writable(main_grad), grad_output, total_input)


def replace_apex() -> None:
    """Make Megatron's option gradient_accumulation_fusion work without apex."""
    from megatron.core.tensor_parallel import layers

    bare_layers: Any = layers
    bare_layers.fused_weight_gradient_mlp_cuda = _MatrixProducts
    bare_layers._grad_accum_fusion_available = True
