"""The layout of sequences in a packed micro-batch, and moving tokens between the packed and the attention order.

Attention needs every sequence whole, so a shared prompt is repeated in front of each response, and some kernels need
padding. The tokens in that order are the *scattered* tokens; a *slot* is a place among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch.row_packing import PackedMicroBatch
from services.trainer.transformer.kernels.fusion import fused_kernels
from services.trainer.transformer.mlp.routing import RouterInputs

AttentionKernel = Literal["blocks", "varlen", "cudnn"]
"""The implementation of attention: torch's scaled_dot_product_attention on padded blocks, torch's variable-length
kernel, or cuDNN's kernel for packed sequences."""
MAX_PADDING = 0.25
"""Largest share of padding tokens in a padded attention call."""
MAX_LENGTH_RATIO = 16
"""Largest ratio of the longest to the shortest sequence in one cuDNN call."""
MIN_SEQUENCES = 8
"""Shorter sequences get a cuDNN call of their own only if there are at least this many."""
MIN_LENGTH = 128
"""cuDNN takes the same time for all sequences up to this many tokens."""


@dataclass(frozen=True)
class CudnnBatch:
    """Sequences of similar lengths for one cuDNN call.

    Count and longest length are rounded up, so that few distinct shapes occur; the added sequences are empty.
    """

    count: int
    """Sequences."""
    longest: int
    """Upper bound of the lengths, in tokens."""
    lengths: Tensor
    """int32 [count]: tokens of each sequence."""
    begins: Tensor
    """int64 [count + 1]: first slot of each sequence, and the number of slots."""


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of a packed micro-batch are, in the forms that attention needs: T tokens, P slots."""

    cu_seqlens: Tensor
    """int32 [sequences + 1]: first slot of each sequence, and P."""
    longest: int
    """Tokens of the longest sequence."""
    kernel: AttentionKernel
    """The implementation of attention."""
    blocks: tuple[tuple[int, int], ...]
    """(sequences, padded length) of each padded attention call."""
    cudnn_batches: tuple[CudnnBatch, ...]
    """The cuDNN calls."""
    as_packed: bool
    """Whether packed and scattered tokens are the same, so that nothing has to be moved."""
    token_of_slot: Tensor
    """int64 [P]: the token in each slot. A sequence is padded to its block with its own tokens."""
    slot_of_token: Tensor
    """int64 [T]: the first slot of each token."""
    shared: bool
    """Whether any token is in more than one sequence."""
    slots: Tensor
    """int64 [P]: all slots of the first token, then of the second ..."""
    slots_begin: Tensor
    """int64 [T + 1]: where each token's slots begin in `slots`, and P."""
    router: RouterInputs
    """Inputs of the routers, in a mixture of experts."""


def sequence_layout(
    batch: PackedMicroBatch, device: torch.device, kernel: AttentionKernel, router: RouterInputs | None = None
) -> SequenceLayout:
    """Lay out the sequences of a micro-batch.

    Args:
        batch: the micro-batch.
        device: device of the indices.
        kernel: the implementation of attention. Only "blocks" needs padding: it puts sequences of similar length into
            one padded block, for one attention call instead of one per sequence.
        router: inputs of the routers, in a mixture of experts.
    """
    members = [batch.places_of(i) for i, (begin, end) in enumerate(pairwise(batch.cu_seqlens)) if begin < end]
    lengths = [len(member) for member in members]
    blocks = _blocks(lengths) if kernel == "blocks" else []
    order = [i for block in blocks for i in block] if blocks else list(range(len(members)))
    width_of = {i: lengths[block[0]] for block in blocks for i in block}
    padded = [np.pad(members[i], (0, width_of.get(i, lengths[i]) - lengths[i]), mode="wrap") for i in order]
    token_of_slot = np.concatenate(padded).astype(np.int64)
    slot_of_token = np.empty(len(batch.tokens), np.int64)
    slot_of_token[token_of_slot[::-1]] = np.arange(len(token_of_slot))[::-1]  # the last write wins: the first slot
    cu_seqlens = np.cumsum([0, *(len(member) for member in padded)])
    return SequenceLayout(
        to_device(cu_seqlens.astype(np.int32), device),
        max(lengths),
        kernel,
        tuple((len(block), lengths[block[0]]) for block in blocks),
        cudnn_batches(lengths, device) if kernel == "cudnn" else (),
        np.array_equal(token_of_slot, np.arange(len(batch.tokens))),
        to_device(token_of_slot, device),
        to_device(slot_of_token, device),
        sum(lengths) > len(batch.tokens),
        to_device(np.argsort(token_of_slot, kind="stable"), device),
        to_device(np.cumsum([0, *np.bincount(token_of_slot, minlength=len(batch.tokens))]), device),
        router or RouterInputs(),
    )


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of sequences of similar length, longest first; equal lengths keep their order."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    blocks: list[list[int]] = []
    for i in order:
        if blocks:
            widest = lengths[blocks[-1][0]]
            tokens = sum(lengths[j] for j in blocks[-1]) + lengths[i]
            if widest * (len(blocks[-1]) + 1) <= (1 + MAX_PADDING) * tokens:
                blocks[-1].append(i)
                continue
        blocks.append([i])
    return blocks


def cudnn_batches(lengths: Sequence[int], device: torch.device) -> tuple[CudnnBatch, ...]:
    """Divide consecutive sequences among cuDNN calls.

    For every sequence, a call starts programs for as many tokens as the longest has; most of a short sequence's
    programs are idle. So a long sequence doesn't share a call with much shorter ones.
    """
    begins, batches = np.cumsum([0, *lengths]), []
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while left:
        longest = max(rounded_up(lengths[left[0]], 2), MIN_LENGTH)
        least = longest // MAX_LENGTH_RATIO if longest > MIN_LENGTH else 0
        here = sorted(i for i in left if lengths[i] >= least)
        if len(left) - len(here) < MIN_SEQUENCES:
            here = sorted(left)
        left = left[len(here) :]
        count = rounded_up(len(here), 4)
        batch_lengths, batch_begins = np.zeros(count, np.int32), np.full(count + 1, begins[-1], np.int64)
        batch_lengths[: len(here)], batch_begins[: len(here)] = [lengths[i] for i in here], begins[here]
        batches.append(CudnnBatch(count, longest, to_device(batch_lengths, device), to_device(batch_begins, device)))
    return tuple(batches)


def rounded_up(number: int, steps: int) -> int:
    """Round up to one of `steps` numbers between consecutive powers of two."""
    step = max((1 << (number - 1).bit_length()) // (2 * steps), 1)
    return -(-number // step) * step


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Convert a numpy array to a tensor on `device`; a copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def scatter_to_sequences(x: Tensor, layout: SequenceLayout, *, sum_copies: bool) -> Tensor:
    """Copy packed tokens to their slots: [T, ...] -> [P, ...].

    Args:
        x: the packed tokens.
        layout: the slots.
        sum_copies: sum the gradients of all copies of a token; otherwise only the first slot's gradient is used.
    """
    scattered: Tensor = _Scatter.apply(x, layout, sum_copies)
    return scattered


def gather_from_sequences(x: Tensor, layout: SequenceLayout) -> Tensor:
    """Copy tokens from their first slots back to the packed order: [P, ...] -> [T, ...]."""
    gathered: Tensor = _Gather.apply(x, layout)
    return gathered


class _Scatter(torch.autograd.Function):
    """x[token_of_slot], with a lookup as backward pass where possible.

    Padding comes last in its sequence and attention is causal, so padding has no gradient. Only tokens that are in
    several sequences have gradients to sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout, sum_copies: bool) -> Tensor:
        ctx.layout, ctx.sum_copies, ctx.shape = layout, sum_copies, x.shape
        return x.flatten(1).index_select(0, layout.token_of_slot).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        layout: SequenceLayout = ctx.layout
        grad = grads[0].flatten(1)
        if ctx.sum_copies and grad.dtype == torch.bfloat16 and fused_kernels():
            from services.trainer.transformer.kernels.layer_kernels import sum_copies

            total = sum_copies(grad.contiguous(), layout.slots, layout.slots_begin)
        elif ctx.sum_copies:
            total = grad.new_zeros(ctx.shape[0], grad.shape[1]).index_add_(0, layout.token_of_slot, grad)
        else:
            total = grad.index_select(0, layout.slot_of_token)
        return total.view(ctx.shape), None, None


class _Gather(torch.autograd.Function):
    """x[slot_of_token]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.layout, ctx.shape = layout, x.shape
        return x.flatten(1).index_select(0, layout.slot_of_token).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].flatten(1)
        return grad.new_zeros(ctx.shape[0], grad.shape[1]).index_copy_(0, ctx.layout.slot_of_token, grad).view(
            ctx.shape
        ), None
