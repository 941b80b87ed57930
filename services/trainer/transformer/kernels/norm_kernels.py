"""Triton kernels that add to the residual and apply RMSNorm in one pass over memory.

Import only if `fusion.fused_kernels()` is True.
"""

# ruff: noqa: ANN001, ANN202  Triton has no types for kernel arguments
# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, misc, unused-ignore"

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528
"""Programs that share the rows in the backward pass: four per multiprocessor of an H100. Each sums its part of the
weight's gradient."""


@triton.jit
def _norm_forward(
    x, addend, weight, total, output, inverses, width, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(addend + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value) / width + epsilon)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, (value * inverse * scale).to(output.dtype.element_ty), mask=mask)
    tl.store(inverses + row, inverse)


@triton.jit
def _norm_backward(
    x, weight, inverses, grad, grad_total, grad_x, grad_weights, rows, width, programs, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for step in range(tl.cdiv(rows - program, programs)):
        row = program + step * programs
        inverse = tl.load(inverses + row)
        value = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32) * inverse
        g = tl.load(grad + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        sums += g * value
        g = g * scale
        result = inverse * (g - value * (tl.sum(g * value) / width))
        result += tl.load(grad_total + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + row * width + columns, result.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_weights + program * width + columns, sums, mask=mask)


def _warps(width: int) -> int:
    return min(max(triton.next_power_of_2(width) // 512, 1), 16)


def norm_forward(x: Tensor, addend: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + addend, its RMSNorm, and the inverse root mean squares.

    Args:
        x: [..., width], contiguous.
        addend: like x; None: x is the sum already.
        weight: [width].
        epsilon: epsilon of the norm.

    Returns:
        The sum (x itself without an addend), its norm [..., width], and float32 [rows].
    """
    width = x.shape[-1]
    rows = x.numel() // width
    total = x if addend is None else torch.empty_like(x)
    output, inverses = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm_forward[(rows,)](
        x, x if addend is None else addend, weight, total, output, inverses, width, epsilon, addend is not None,
        triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return total, output, inverses


def norm_backward(
    total: Tensor, weight: Tensor, inverses: Tensor, grad_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum and of the weight, given those of the sum and its norm."""
    width, rows = total.shape[-1], len(inverses)
    programs = min(rows, PROGRAMS)
    grad_x = torch.empty_like(total)
    grad_weights = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    _norm_backward[(programs,)](
        total, weight, inverses, grad.contiguous(), grad_total.contiguous(), grad_x, grad_weights, rows, width,
        programs, triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return grad_x, grad_weights.sum(0).to(weight.dtype)
