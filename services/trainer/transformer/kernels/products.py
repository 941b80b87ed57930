"""Matrix products: grouped products, of each expert's rows with its matrix, and bfloat16 products in float32."""

import logging
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.megatron.gradient_accumulation import add_product_
from services.trainer.transformer.kernels import fused_kernels

logger = logging.getLogger(__name__)


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert e by matrices[e].

    Args:
        rows: [R, k], contiguous, sorted by expert.
        matrices: [E, k, n], each contiguous or transposed.
        ends: int32 [E], the end of each expert's rows.

    Returns:
        [R, n].
    """
    if not len(rows):
        return rows.new_empty(0, matrices.shape[2])
    if _grouped(rows, matrices.shape[2]):
        product: Tensor = functional.grouped_mm(rows, matrices, offs=ends)
        return product
    output = rows.new_empty(len(rows), matrices.shape[2])
    for expert, part in _parts(ends):
        torch.mm(rows[part], matrices[expert], out=output[part])
    return output


def add_grouped_products_(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """Add left.T @ right, over the rows of each expert e, to total[e], with float32 sums.

    Args:
        total: float32 [E, m, n], contiguous.
        left: [R, m], contiguous, sorted by expert.
        right: [R, n], the same element type.
        ends: int32 [E], the end of each expert's rows.
    """
    if not len(left):
        return
    if _grouped(left, right.shape[1]):
        from services.trainer.transformer.kernels import expert_kernels

        expert_kernels.add_grouped_products_(total, left, right, ends)
        return
    for expert, part in _parts(ends):
        add_product_(total[expert], left[part], right[part])


@lru_cache(maxsize=1)
def grouped_kernels() -> bool:
    """Return True if grouped matrix products work on this machine's GPU. Try once, and log the result."""
    if not torch.cuda.is_available() or not fused_kernels():
        return False
    try:
        _try_kernels()
    except (AssertionError, AttributeError, ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "experts are computed one by one, several times slower than together: grouped matrix products need "
            "torch 2.10 and an H100 or newer, and fail here: %r",
            error,
        )
        return False
    logger.info("experts are computed together, by grouped matrix products")
    return True


def _try_kernels() -> None:
    """Compare the grouped kernels with a loop over three experts, one without rows. Raise if the results differ."""
    if torch.cuda.get_device_capability() < (9, 0):
        raise RuntimeError(f"the GPU has compute capability {torch.cuda.get_device_capability()}")
    from services.trainer.transformer.kernels import expert_kernels

    generator = torch.Generator("cuda").manual_seed(0)
    settings: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    rows, right = torch.randn(100, 64, **settings), torch.randn(100, 32, **settings)
    matrices = torch.randn(3, 64, 32, **settings)
    ends = torch.tensor([70, 70, 100], dtype=torch.int32, device="cuda")
    product = functional.grouped_mm(rows, matrices, offs=ends)
    total = torch.ones(3, 64, 32, device="cuda")
    expert_kernels.add_grouped_products_(total, rows, right, ends)
    for expert, part in _parts(ends):
        torch.testing.assert_close(product[part], rows[part] @ matrices[expert], atol=0.1, rtol=0.02)
        expected = 1 + rows[part].float().t() @ right[part].float()
        torch.testing.assert_close(total[expert], expected, atol=0.01, rtol=0.01)


def _grouped(rows: Tensor, width: int) -> bool:
    aligned = rows.shape[1] % 8 == 0 and width % 8 == 0  # rows of 16 bytes
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and grouped_kernels()


def _parts(ends: Tensor) -> list[tuple[int, slice]]:
    """Return the index and the slice of rows of each expert that has any. Synchronizes with the GPU."""
    bounds = [0, *ends.tolist()]
    return [(e, slice(bounds[e], bounds[e + 1])) for e in range(len(ends)) if bounds[e] < bounds[e + 1]]


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.T, computed in float32. Products of bfloat16 numbers are exact; only sums are rounded.

    Args:
        left: [n, k], bfloat16 or float32.
        right: [m, k], the same element type.

    Returns:
        float32 [n, m].
    """
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right.t(), out_dtype=torch.float32)  # on tensor cores
    return left.float() @ right.float().t()
