"""Chooses the attention kernel: the first that works on this machine. Kernels are tried once per process."""

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.transformer.sequence_layout import (
    AttentionKernel,
    QuerySlice,
    cudnn_batches,
    query_slice,
    scatter_to_sequences,
)

logger = logging.getLogger(__name__)

LENGTHS = (300, 1, 77, 128)
"""Sequence lengths for trying kernels, in tokens."""
WINDOW = 100
"""Attention window for trying kernels, in tokens."""


class AttentionUnavailable(RuntimeError):
    """The configured attention kernel doesn't work on this machine."""


def attention_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    configured: str,
    window: int | None = None,
    *,
    sliced: bool = False,
) -> AttentionKernel:
    """Return the name of the attention kernel to use. Log it once, and why a faster kernel doesn't work.

    Args:
        device: device of the computation.
        dtype: element type of queries, keys and values.
        head_size: width of a head.
        configured: `trainer.attention`.
        window: tokens that a token attends to in layers with sliding-window attention, if there are any.
        sliced: whether a rank computes the queries of only a slice of the tokens (`QuerySlice`).

    Raises:
        AttentionUnavailable: `configured` isn't "auto" and doesn't work, or no kernel computes windows or slices.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "blocks"
    return (_of_slices if sliced else _on_gpu)(configured, head_size, window is not None)


@lru_cache
def takes_prompts_once(kernel: AttentionKernel, configured: str, head_size: int, windowed: bool) -> bool:
    """Return True if attention can compute the queries of a shared prompt only once. Log it, with the reason if not.

    Args:
        kernel: the kernel for whole sequences.
        configured: `trainer.attention`; with "cudnn" no other kernel is used.
        head_size: width of a head.
        windowed: whether there are layers with sliding-window attention.
    """
    if kernel == "blocks" or configured == "cudnn":  # on CPUs a call per sequence costs more than it saves
        return False
    flash = _newest_flash_attention(head_size, windowed)
    if failure := _failure(_varlen_in_slices, head_size, windowed):
        logger.info(
            "attention computes the queries of a shared prompt again for each sample, because %s fails in slices: %s",
            *(flash, failure),
        )
        return False
    logger.info("attention computes the queries of long shared prompts once, by torch's kernel (%s)", flash)
    return True


@lru_cache
def _of_slices(configured: str, head_size: int, windowed: bool) -> AttentionKernel:
    if configured == "cudnn":
        raise AttentionUnavailable(
            "trainer.attention is \"cudnn\", which can't compute slices of the queries, but the model's query heads "
            'don\'t divide among trainer.context_parallel ranks: set "auto" or "varlen", or a size that divides them'
        )
    flash = _newest_flash_attention(head_size, windowed)
    if broken := _failure(_varlen_in_slices, head_size, windowed):
        raise AttentionUnavailable(
            "the model's query heads don't divide among trainer.context_parallel ranks, and no attention kernel "
            f"computes slices of the queries here; {flash} fails: {broken}. Set a size that divides the heads"
        )
    logger.info("attention from slices of the tokens by torch's variable-length kernel (%s)", flash)
    return "varlen"


@lru_cache
def _on_gpu(configured: str, head_size: int, windowed: bool) -> AttentionKernel:
    failure = None
    if configured != "varlen":
        failure = _failure(_cudnn, head_size, windowed)
        if failure is None:
            logger.info("attention by cuDNN")
            return "cudnn"
        if configured == "cudnn":
            raise AttentionUnavailable(
                f'trainer.attention is "cudnn", which doesn\'t work here: {failure}. It needs the package '
                'nvidia-cudnn-frontend, cuDNN 9.6 and an H100 or newer; "auto" uses it only where it works'
            )
    flash = _newest_flash_attention(head_size, windowed)
    if windowed and (broken := _failure(_varlen, head_size, windowed)):
        raise AttentionUnavailable(f"no attention kernel computes sliding windows here; {flash} fails: {broken}")
    logger.info(
        "attention by torch's variable-length kernel (%s)%s", flash, f"; cuDNN fails: {failure}" if failure else ""
    )
    return "varlen"


def visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return a mask of the keys that each query attends to: its own and the window - 1 before.

    The queries belong to the last keys.

    Returns:
        The mask, bool [queries, keys].
    """
    before = keys - queries
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before).triu(before + 1 - window)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within each sequence by torch's variable-length kernel.

    If a sequence has more keys than queries, the queries belong to its last keys.

    Args:
        query: bfloat16 [queries, heads, size].
        key: bfloat16 [keys, kv_heads, size]; kv_heads divide heads.
        value: like `key`.
        begins: int32 [sequences + 1] each: first query and first key of each sequence, then the total numbers.
        longest: maximum numbers of queries and of keys in a sequence.
        scale: factor of the scores.
        window: tokens that a token attends to, itself included; None for all before it.

    Returns:
        [queries, heads, size].
    """
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None else window - 1
    settings: dict[str, Any] = {"scale": scale, "window_size": (before, 0), **_grouped_heads()}
    output: Any = varlen_attn(query, key, value, *begins, *longest, **settings)
    return output


def slice_by_varlen(
    query: Tensor, key: Tensor, value: Tensor, own: QuerySlice, scale: float, window: int | None
) -> Tensor:
    """Return the attention of a query slice, by one call of `varlen_attention` for all pieces of sequences.

    `key` and `value` are in the order of the slice's slots.
    """
    longest = max(queries for queries, _ in own.lengths), max(keys for _, keys in own.lengths)
    return varlen_attention(query, key, value, (own.cu_queries, own.cu_keys), longest, scale=scale, window=window)


@lru_cache
def _grouped_heads() -> dict[str, bool]:
    """Return the keyword argument that enables grouped-query attention in torch 2.13 and later; {} in older torch."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _newest_flash_attention(head_size: int, windowed: bool) -> str:
    """Switch torch to FlashAttention 3 if it is installed and works. Return the name of the version in use."""
    try:
        from torch.nn import attention

        attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return "FlashAttention 2"
    failure = _failure(_varlen, head_size, windowed)
    if failure is None:
        return "FlashAttention 3"
    logger.warning("FlashAttention 3 is installed, but fails: %s", failure)
    attention.restore_flash_attention_impl()
    return "FlashAttention 2"


def _cudnn(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    from services.trainer.transformer.cudnn_attention import cudnn_attention

    return cudnn_attention(query, key, value, cudnn_batches(LENGTHS, query.device), query.shape[-1] ** -0.5, window)


def _varlen(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    begins, longest = torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32, device=query.device), max(LENGTHS)
    return varlen_attention(
        query, key, value, (begins, begins), (longest, longest), scale=query.shape[-1] ** -0.5, window=window
    )


def _varlen_in_slices(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Try `slice_by_varlen`: compute attention in slices of the queries, some of which begin within a sequence."""
    tokens, outputs = sum(LENGTHS), []
    sequences = [((begin, end), np.arange(begin, end)) for begin, end in pairwise(np.cumsum([0, *LENGTHS]).tolist())]
    for begin, end in pairwise((0, 200, 350, tokens)):
        own = query_slice(sequences, tokens, begin, end, query.device)
        k, v = (scatter_to_sequences(x, own.slots, sum_copies=True) for x in (key, value))
        outputs.append(slice_by_varlen(query[begin:end], k, v, own, query.shape[-1] ** -0.5, window))
    return torch.cat(outputs)


def _failure(
    attend: Callable[[Tensor, Tensor, Tensor, int | None], Tensor], head_size: int, windowed: bool
) -> str | None:
    """Compare a kernel, forward and backward, with the formula in float32. Return the reason for a failure, or None."""
    try:
        if attend is _cudnn and torch.cuda.get_device_capability() < (9, 0):
            return f"the GPU has compute capability {torch.cuda.get_device_capability()}"
        generator = torch.Generator("cuda").manual_seed(0)
        settings: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        inputs = [torch.randn(sum(LENGTHS), heads, head_size, **settings).requires_grad_() for heads in (4, 2, 2)]
        grad = torch.randn(sum(LENGTHS), 4, head_size, **settings)
        query, key, value = inputs
        exact = [x.detach().float().requires_grad_() for x in inputs]
        for window in (None, WINDOW) if windowed else (None,):
            output = attend(query, key, value, window)
            found = [output, *torch.autograd.grad(output, inputs, grad)]
            reference = _formula(exact[0], exact[1], exact[2], window)
            expected = [reference, *torch.autograd.grad(reference, exact, grad.float())]
            for ours, theirs in zip(found, expected, strict=True):
                error = float((ours.detach().float() - theirs.detach()).norm() / theirs.detach().norm())
                if not error < 0.02:
                    return f"its results are off by {error:.3g}" + (f" with a window of {window}" if window else "")
    except Exception as error:  # third-party code: any exception means that it doesn't work
        return f"{type(error).__name__}: {error}"
    return None


def _formula(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    outputs = []
    for q, k, v in zip(*(x.transpose(0, 1).split(LENGTHS, 1) for x in (query, key, value)), strict=True):
        mask = visible(q.shape[1], q.shape[1], window or q.shape[1], q.device)
        outputs.append(
            functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
        )
    return torch.cat(outputs, 2)[0].transpose(0, 1)
