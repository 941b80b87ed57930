"""Triton kernels of the experts: copying rows to and from experts, weighted SwiGLU, gradients of the experts' matrices.

Import only if `fused_kernels()` is True.
"""

# ruff: noqa: ANN001, ANN202  Triton has no types for kernel arguments
# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, misc, unused-ignore"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns that a Triton program handles."""
TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
"""Launch options of the kernel for gradients of experts' matrices: tile sizes (M, N) and rows summed at a time (K). Two
such programs fit on a multiprocessor of an H100, so that one multiplies while the other adds its tile to the
gradient."""


@triton.jit
def _copy_to_rows(x, places, rows, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + token * width + columns, mask=mask)
    for copy in tl.static_range(COPIES):
        row = tl.load(places + token * COPIES + copy)
        tl.store(rows + row * width + columns, value, mask=mask)


@triton.jit
def _sum_of_rows(rows, places, output, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(places + token * COPIES + copy)
        total += tl.load(rows + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * width + columns, total.to(output.dtype.element_ty), mask=mask)


def copy_to_rows(x: Tensor, places: Tensor) -> Tensor:
    """Copy each token to the rows of its experts; see `routing.copy_to_rows`."""
    (tokens, copies), width = places.shape, x.shape[1]
    rows = x.new_empty(tokens * copies, width)
    if rows.numel():
        _copy_to_rows[(tokens, triton.cdiv(width, BLOCK))](x.contiguous(), places, rows, width, copies, BLOCK)
    return rows


def sum_of_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Sum the rows of each token's experts; see `routing.sum_of_rows`."""
    (tokens, copies), width = places.shape, rows.shape[1]
    output = rows.new_empty(tokens, width)
    if output.numel():
        _sum_of_rows[(tokens, triton.cdiv(width, BLOCK))](rows.contiguous(), places, output, width, copies, BLOCK)
    return output


@triton.jit
def _weighted_swiglu_forward(x, weights, output, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up * tl.load(weights + row)
    tl.store(output + row * size + columns, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_swiglu_backward(x, weights, grad, grad_x, output, grad_weights, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < size
        gate = tl.load(x + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        activated = gate * sigmoid * up
        total += g * activated
        g = g * weight
        grad_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        grad_up = g * gate * sigmoid
        tl.store(grad_x + row * 2 * size + columns, grad_gate.to(grad_x.dtype.element_ty), mask=mask)
        tl.store(grad_x + row * 2 * size + size + columns, grad_up.to(grad_x.dtype.element_ty), mask=mask)
        tl.store(output + row * size + columns, (activated * weight).to(output.dtype.element_ty), mask=mask)
    tl.store(grad_weights + row, tl.sum(total))


def weighted_swiglu_forward(x: Tensor, weights: Tensor) -> Tensor:
    """Return silu(gate) * up * weight [R, n] for x [R, 2 n] = [gate, up] and float32 weights [R]."""
    rows, size = x.shape[0], x.shape[1] // 2
    output = x.new_empty(rows, size)
    if output.numel():
        _weighted_swiglu_forward[(rows, triton.cdiv(size, BLOCK))](x, weights, output, size, BLOCK)
    return output


def weighted_swiglu_backward(x: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [R, 2 n] and weights [R] of `weighted_swiglu_forward`, and its output [R, n] again."""
    rows, size = grad.shape
    grad_x, output, grad_weights = torch.empty_like(x), torch.empty_like(grad), torch.empty_like(weights)
    if output.numel():
        _weighted_swiglu_backward[(rows,)](x, weights, grad, grad_x, output, grad_weights, size, BLOCK)
    return grad_x, grad_weights, output


@triton.jit
def _add_grouped_products(
    total, left, right, ends, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(1)
    end = tl.load(ends + expert)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if end > begin:
        tiles = tl.cdiv(n, BLOCK_N)
        in_m = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        in_n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        # Indices beyond the matrix's edge wrap around; their results are masked out at the end.
        read_m = tl.max_contiguous(tl.multiple_of(in_m % m, BLOCK_M), BLOCK_M)
        read_n = tl.max_contiguous(tl.multiple_of(in_n % n, BLOCK_N), BLOCK_N)
        step = tl.arange(0, BLOCK_K)
        from_left = left + begin.to(tl.int64) * m + (step[:, None] * m + read_m[None, :])
        from_right = right + begin.to(tl.int64) * n + (step[:, None] * n + read_n[None, :])
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, end - begin, BLOCK_K):
            inside = step[:, None] < end - begin - k
            a = tl.load(from_left, mask=inside, other=0.0)
            b = tl.load(from_right, mask=inside, other=0.0)
            sums = tl.dot(tl.trans(a), b, sums)
            from_left += BLOCK_K * m
            from_right += BLOCK_K * n
        into = total + expert.to(tl.int64) * m * n + (in_m[:, None] * n + in_n[None, :])
        mask = (in_m < m)[:, None] & (in_n < n)[None, :]
        tl.store(into, tl.load(into, mask=mask, other=0.0) + sums, mask=mask)


def add_grouped_products_(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """Add left.T @ right over the rows of each expert e to total[e]; see `products.add_grouped_products_`."""
    experts, m, n = total.shape
    grid = (triton.cdiv(m, TILES["BLOCK_M"]) * triton.cdiv(n, TILES["BLOCK_N"]), experts)
    _add_grouped_products[grid](total, left, right, ends, m, n, **TILES)
