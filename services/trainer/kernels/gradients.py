"""Weight gradients added up in float32 where they belong, without a bf16 copy in between."""

import torch
from torch import Tensor


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right, with float32 sums.

    Args:
        total: float32 [n, m].
        left: [k, n], of any element type.
        right: [k, m], of the same type.
    """
    if len(left) == 0:  # an expert that no token was sent to
        return
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:  # torch has mixed types for CUDA only
        total.add_(left.t() @ right)
