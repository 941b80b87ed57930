"""Triton kernels over a chunk of logits, one pass each: softmax statistics, and the gradient in place.

Import only if `fused_kernels()` is True.
"""

# ruff: noqa: ANN001, ANN202  Triton has no types for kernel arguments
# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, misc, unused-ignore"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits per iteration."""


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
        _vocabulary_statistics[(count,)](logits, temperature, tokens, output, count, size, BLOCK, num_warps=8)
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
        _vocabulary_gradient[(count, triton.cdiv(size, BLOCK))](
            logits,
            temperature,
            tokens,
            log_sums,
            entropies,
            grad_logprobs,
            grad_logprobs if grad_entropies is None else grad_entropies,
            size,
            BLOCK,
            grad_entropies is not None,
            num_warps=8,
        )
    return logits
