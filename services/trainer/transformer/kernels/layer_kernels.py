"""Triton kernels for the work between matrix products. In a layer: SwiGLU, query, key and value heads, shared prompts,
and the residual with its norm. Over a chunk of logits: softmax statistics, and the gradient in place.

Each replaces several passes over memory by torch's own operations. Import only if `fused_kernels()` is True.
"""

# ruff: noqa: ANN001, ANN202  Triton has no types for kernel arguments
# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, misc, unused-ignore"

import torch
import triton
import triton.language as tl
from torch import Tensor

# ruff: noqa: ANN001, ANN202  Triton has no types for kernel arguments
# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, misc, unused-ignore"


BLOCK = 1024
"""Columns that a Triton program of SwiGLU handles."""
PROGRAMS = 1056
"""Maximum number of Triton programs in the heads' backward pass: eight per H100 multiprocessor. Each sums a part of the
norms' gradients."""
ROWS = 16
"""Number of heads that a program of the heads' backward pass handles per iteration."""


@triton.jit
def _swiglu_forward(x, output, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(output + row * size + columns, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(x, grad, grad_x, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * size + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_x + row * 2 * size + columns, grad_gate.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_x + row * 2 * size + size + columns, (g * gate * sigmoid).to(grad_x.dtype.element_ty), mask=mask)


def swiglu_forward(x: Tensor) -> Tensor:
    """Return silu(gate) * up for x = [gate, up]: [..., 2 n] -> [..., n]."""
    x = x.contiguous()
    size = x.shape[-1] // 2
    output = x.new_empty(*x.shape[:-1], size)
    if x.numel():
        _swiglu_forward[(output.numel() // size, triton.cdiv(size, BLOCK))](x, output, size, BLOCK)
    return output


def swiglu_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of x [..., 2 n] of `swiglu_forward`, given the output's gradient [..., n]."""
    grad = grad.contiguous()
    size = grad.shape[-1]
    grad_x = torch.empty_like(x)
    if x.numel():
        _swiglu_backward[(grad.numel() // size, triton.cdiv(size, BLOCK))](x, grad, grad_x, size, BLOCK)
    return grad_x


@triton.jit
def _places(token, groups, HEADS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr):
    """Return where each head's first half begins in qkv, in queries, and in keys or values; and the head's kind."""
    head = tl.arange(0, HEADS)
    group = head // (QUERIES + 2)
    place = head % (QUERIES + 2)
    column = tl.arange(0, HALF)[None, :]
    inside = group < groups
    in_qkv = (token * groups * (QUERIES + 2) + head)[:, None] * (2 * HALF) + column
    in_queries = (token * groups * QUERIES + group * QUERIES + place)[:, None] * (2 * HALF) + column
    in_keys = (token * groups + group)[:, None] * (2 * HALF) + column
    is_query = (inside & (place < QUERIES))[:, None]
    is_key = (inside & (place == QUERIES))[:, None]
    is_value = (inside & (place == QUERIES + 1))[:, None]
    return in_qkv, in_queries, in_keys, is_query, is_key, is_value


@triton.jit
def _heads_forward(
    qkv, query_weight, key_weight, table, query, key, value, tokens, groups, epsilon,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    in_qkv, in_queries, in_keys, is_query, is_key, is_value = _places(token, groups, HEADS, QUERIES, HALF)
    inside = is_query | is_key | is_value
    rotated = is_query | is_key
    column = tl.arange(0, HALF)
    first = tl.load(qkv + in_qkv, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + in_qkv + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(value + in_keys, first.to(value.dtype.element_ty), mask=is_value)
    tl.store(value + in_keys + HALF, second.to(value.dtype.element_ty), mask=is_value)
    if NORM:
        square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        inverse = (1.0 / tl.sqrt(square + epsilon))[:, None]
        q1 = tl.load(query_weight + column).to(tl.float32)[None, :]
        q2 = tl.load(query_weight + HALF + column).to(tl.float32)[None, :]
        k1 = tl.load(key_weight + column).to(tl.float32)[None, :]
        k2 = tl.load(key_weight + HALF + column).to(tl.float32)[None, :]
        first = first * inverse * tl.where(is_query, q1, k1)
        second = second * inverse * tl.where(is_query, q2, k2)
    cos = tl.load(table + token * HALF + column)[None, :]
    sin = tl.load(table + (tokens + token) * HALF + column)[None, :]
    one = (first * cos - second * sin).to(query.dtype.element_ty)
    two = (second * cos + first * sin).to(query.dtype.element_ty)
    tl.store(query + in_queries, one, mask=is_query)
    tl.store(query + in_queries + HALF, two, mask=is_query)
    tl.store(key + in_keys, one, mask=rotated & is_key)
    tl.store(key + in_keys + HALF, two, mask=rotated & is_key)


@triton.jit
def _heads_backward(
    qkv, query_weight, key_weight, table, grad_query, grad_key, grad_value, grad_qkv, grad_weights, tokens, groups,
    epsilon, programs,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    # A row is one head of one token, in the order of qkv.
    heads = groups * (QUERIES + 2)
    column = tl.arange(0, HALF)[None, :]
    sum_q1 = tl.zeros((ROWS, HALF), tl.float32)
    sum_q2 = tl.zeros((ROWS, HALF), tl.float32)
    sum_k1 = tl.zeros((ROWS, HALF), tl.float32)
    sum_k2 = tl.zeros((ROWS, HALF), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens * heads, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS)
        token = (row // heads).to(tl.int64)
        group = row % heads // (QUERIES + 2)
        place = row % heads % (QUERIES + 2)
        inside = row < tokens * heads
        in_qkv = row.to(tl.int64)[:, None] * (2 * HALF) + column
        in_queries = ((token * groups + group) * QUERIES + place)[:, None] * (2 * HALF) + column
        in_keys = (token * groups + group)[:, None] * (2 * HALF) + column
        is_query = (inside & (place < QUERIES))[:, None]
        is_key = (inside & (place == QUERIES))[:, None]
        is_value = (inside & (place == QUERIES + 1))[:, None]
        rotated = is_query | is_key
        one = tl.load(grad_query + in_queries, mask=is_query, other=0.0).to(tl.float32)
        one += tl.load(grad_key + in_keys, mask=is_key, other=0.0).to(tl.float32)
        two = tl.load(grad_query + in_queries + HALF, mask=is_query, other=0.0).to(tl.float32)
        two += tl.load(grad_key + in_keys + HALF, mask=is_key, other=0.0).to(tl.float32)
        cos = tl.load(table + token[:, None] * HALF + column, mask=rotated, other=0.0)
        sin = tl.load(table + (tokens + token)[:, None] * HALF + column, mask=rotated, other=0.0)
        first = one * cos + two * sin
        second = two * cos - one * sin
        if NORM:
            x1 = tl.load(qkv + in_qkv, mask=rotated, other=0.0).to(tl.float32)
            x2 = tl.load(qkv + in_qkv + HALF, mask=rotated, other=0.0).to(tl.float32)
            square = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF)
            inverse = (1.0 / tl.sqrt(square + epsilon))[:, None]
            x1 = x1 * inverse
            x2 = x2 * inverse
            sum_q1 += tl.where(is_query, first * x1, 0.0)
            sum_q2 += tl.where(is_query, second * x2, 0.0)
            sum_k1 += tl.where(is_key, first * x1, 0.0)
            sum_k2 += tl.where(is_key, second * x2, 0.0)
            q1 = tl.load(query_weight + column).to(tl.float32)
            q2 = tl.load(query_weight + HALF + column).to(tl.float32)
            k1 = tl.load(key_weight + column).to(tl.float32)
            k2 = tl.load(key_weight + HALF + column).to(tl.float32)
            first = first * tl.where(is_query, q1, k1)
            second = second * tl.where(is_query, q2, k2)
            mean = ((tl.sum(first * x1, 1) + tl.sum(second * x2, 1)) / (2 * HALF))[:, None]
            first = inverse * (first - x1 * mean)
            second = inverse * (second - x2 * mean)
        tl.store(grad_qkv + in_qkv, first.to(grad_qkv.dtype.element_ty), mask=rotated)
        tl.store(grad_qkv + in_qkv + HALF, second.to(grad_qkv.dtype.element_ty), mask=rotated)
        first = tl.load(grad_value + in_keys, mask=is_value, other=0.0)
        second = tl.load(grad_value + in_keys + HALF, mask=is_value, other=0.0)
        tl.store(grad_qkv + in_qkv, first, mask=is_value)
        tl.store(grad_qkv + in_qkv + HALF, second, mask=is_value)
    if NORM:
        output = grad_weights + tl.program_id(0).to(tl.int64) * 4 * HALF + tl.arange(0, HALF)
        tl.store(output, tl.sum(sum_q1, 0))
        tl.store(output + HALF, tl.sum(sum_q2, 0))
        tl.store(output + 2 * HALF, tl.sum(sum_k1, 0))
        tl.store(output + 3 * HALF, tl.sum(sum_k2, 0))


def _warps(heads: int, head_size: int) -> int:
    """Return the number of warps whose registers can hold all heads of a token."""
    return min(max(triton.next_power_of_2(heads) * head_size // 1024, 1), 16)


def heads_forward(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, table: Tensor, groups: int, head_size: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values. Normalise queries and keys per head, and rotate both.

    Args:
        qkv: [T, groups x (queries + 2) x head_size], contiguous: each key-value head after its query heads.
        norms: weights [head_size] of the queries' and the keys' norm, if there are any.
        table: `rotary_table`, float32 [2, T, 1, head_size / 2], contiguous.
        groups: key-value heads.
        head_size: width of a head, a power of two.
        epsilon: epsilon of the norms.

    Returns:
        [T, groups x queries, head_size], [T, groups, head_size] and [T, groups, head_size].
    """
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_size
    queries = heads // groups - 2
    query = qkv.new_empty(tokens, groups * queries, head_size)
    key, value = (qkv.new_empty(tokens, groups, head_size) for _ in range(2))
    query_weight, key_weight = norms or (qkv, qkv)
    _heads_forward[(tokens,)](
        qkv, query_weight, key_weight, table, query, key, value, tokens, groups, epsilon,
        triton.next_power_of_2(heads), queries, head_size // 2, norms is not None, num_warps=_warps(heads, head_size),
    )  # fmt: skip
    return query, key, value


def heads_backward(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    table: Tensor,
    groups: int,
    head_size: int,
    epsilon: float,
    grads: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of qkv and norm weights of `heads_forward`, given the gradients of its outputs."""
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_size
    programs = min(triton.cdiv(tokens * heads, ROWS), PROGRAMS)
    grad_qkv = torch.empty_like(qkv)
    sums = torch.empty(programs, 2, head_size, dtype=torch.float32, device=qkv.device)
    query_weight, key_weight = norms or (qkv, qkv)
    grad_query, grad_key, grad_value = (grad.contiguous() for grad in grads)
    _heads_backward[(programs,)](
        qkv, query_weight, key_weight, table, grad_query, grad_key, grad_value, grad_qkv, sums, tokens, groups,
        epsilon, programs, ROWS, heads // groups - 2, head_size // 2, norms is not None,
    )  # fmt: skip
    if norms is None:
        return grad_qkv, None, None
    grad_weights = sums.sum(0)
    return grad_qkv, grad_weights[0].to(query_weight.dtype), grad_weights[1].to(key_weight.dtype)


@triton.jit
def _sum_copies(x, places, offsets, output, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.load(offsets + token), tl.load(offsets + token + 1)):
        place = tl.load(places + index)
        total += tl.load(x + place * width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * width + columns, total.to(output.dtype.element_ty), mask=mask)


def sum_copies(x: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    """Sum the copies of each token, in float32 and always in the same order.

    Args:
        x: [P, width], contiguous.
        places: int64 [P], indices in x of the first token's copies, then of the second's ...
        offsets: int64 [T + 1], where each token's indices begin in `places`, and P.

    Returns:
        [T, width].
    """
    tokens, width = len(offsets) - 1, x.shape[1]
    output = x.new_empty(tokens, width)
    _sum_copies[(tokens, triton.cdiv(width, BLOCK))](x, places, offsets, output, width, BLOCK)
    return output


NORM_PROGRAMS = 528
"""Maximum number of Triton programs in RMSNorm's backward pass: four per H100 multiprocessor. Each sums a part of the
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


def _norm_warps(width: int) -> int:
    return min(max(triton.next_power_of_2(width) // 512, 1), 16)


def norm_forward(x: Tensor, addend: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + addend, the RMSNorm of this sum, and each row's inverse root mean square.

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
        triton.next_power_of_2(width), num_warps=_norm_warps(width),
    )  # fmt: skip
    return total, output, inverses


def norm_backward(
    total: Tensor, weight: Tensor, inverses: Tensor, grad_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of sum and weight in `norm_forward`, given the gradients of its outputs sum and norm."""
    width, rows = total.shape[-1], len(inverses)
    programs = min(rows, NORM_PROGRAMS)
    grad_x = torch.empty_like(total)
    grad_weights = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    _norm_backward[(programs,)](
        total, weight, inverses, grad.contiguous(), grad_total.contiguous(), grad_x, grad_weights, rows, width,
        programs, triton.next_power_of_2(width), num_warps=_norm_warps(width),
    )  # fmt: skip
    return grad_x, grad_weights.sum(0).to(weight.dtype)


LOGITS_BLOCK = 4096
"""Logits that a Triton program handles per iteration."""


@triton.jit
def _vocabulary_statistics(logits, temperature, tokens, output, count, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    temper = tl.load(temperature + row)
    logits += row.to(tl.int64) * size
    largest = -1.0e30
    total = 0.0
    weighted = 0.0
    for begin in range(0, size, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < size
        z = tl.load(logits + columns, mask=mask, other=float("-inf")).to(tl.float32) / temper
        before = largest
        largest = tl.maximum(before, tl.max(z, 0))
        shift = before - largest
        scale = tl.exp(shift)
        exponentials = tl.exp(z - largest)
        weighted = scale * (weighted + shift * total) + tl.sum(tl.where(mask, (z - largest) * exponentials, 0.0), 0)
        total = scale * total + tl.sum(exponentials, 0)
    token = tl.load(tokens + row)
    of_token = tl.load(logits + token, mask=token >= 0, other=0.0).to(tl.float32) / temper
    tl.store(output + row, largest)
    tl.store(output + count + row, total)
    tl.store(output + 2 * count + row, weighted)
    tl.store(output + 3 * count + row, of_token)


@triton.jit
def _vocabulary_gradient(
    logits, temperature, tokens, log_sums, entropies, grad_logprobs, grad_entropies, size,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    logits += row.to(tl.int64) * size
    temper = tl.load(temperature + row)
    through_logprob = tl.load(grad_logprobs + row)
    z = tl.load(logits + columns, mask=mask, other=0.0).to(tl.float32) / temper
    logprobs = z - tl.load(log_sums + row)
    factor = -through_logprob
    if ENTROPY:
        factor = factor - tl.load(grad_entropies + row) * (logprobs + tl.load(entropies + row))
    gradient = tl.exp(logprobs) * factor
    gradient += tl.where(columns == tl.load(tokens + row), through_logprob, 0.0)
    tl.store(logits + columns, (gradient / temper).to(logits.dtype.element_ty), mask=mask)


def vocabulary_statistics(logits: Tensor, temperature: Tensor, tokens: Tensor) -> Tensor:
    """Compute the softmax statistics of each row of z = logits / temperature.

    Args:
        logits: [n, size], contiguous.
        temperature: float32 [n].
        tokens: int64 [n], one column per row, or -1.

    Returns:
        float32 [4, n]: the largest z of each row, sum exp(z - largest), sum (z - largest) exp(z - largest), and z of
        the row's token (0 where that is -1).
    """
    count, size = logits.shape
    output = torch.empty(4, count, dtype=torch.float32, device=logits.device)
    if count:
        _vocabulary_statistics[(count,)](logits, temperature, tokens, output, count, size, LOGITS_BLOCK, num_warps=8)
    return output


def vocabulary_gradient_(
    logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    log_sums: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
) -> Tensor:
    """Overwrite logits [n, size] with their gradient and return them.

    `grad_logprobs` and `grad_entropies`, [n], are the gradients of the tokens' log-probs and of the entropies.
    """
    count, size = logits.shape
    if count:
        _vocabulary_gradient[(count, triton.cdiv(size, LOGITS_BLOCK))](
            logits,
            temperature,
            tokens,
            log_sums,
            entropies,
            grad_logprobs,
            grad_logprobs if grad_entropies is None else grad_entropies,
            size,
            LOGITS_BLOCK,
            grad_entropies is not None,
            num_warps=8,
        )
    return logits
