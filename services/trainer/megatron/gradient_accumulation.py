"""Weight gradients accumulated in float32 buffers, without an intermediate bf16 copy."""

import torch
from torch import Tensor


def writable(main_grad: Tensor) -> Tensor:
    """Return Megatron's gradient buffer of a parameter, once it has memory: a sharded one may have none yet.

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
