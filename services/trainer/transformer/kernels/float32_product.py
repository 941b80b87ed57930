"""Products of bfloat16 matrices in float32."""

import torch
from torch import Tensor


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.T in float32: products of bfloat16 are exact in it, and so only sums are rounded.

    Args:
        left: [n, k], bfloat16 or float32.
        right: [m, k], the same element type.

    Returns:
        float32 [n, m].
    """
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right.t(), out_dtype=torch.float32)  # on tensor cores
    return left.float() @ right.float().t()
