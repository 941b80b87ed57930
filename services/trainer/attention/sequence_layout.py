"""Where the sequences of a packed micro-batch are, and moving its tokens to where attention wants them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch.packing import PackedMicroBatch
from services.trainer.kernels.fusion import fused_kernels
from services.trainer.mlp.routing import RouterInputs

AttentionKernel = Literal["blocks", "varlen", "cudnn"]
"""How attention is computed: in padded blocks by torch's scaled_dot_product_attention, by torch's variable-length
kernel, or by cuDNN's for packed sequences."""
MAX_PADDING = 0.25
"""Sequences share one padded attention call while padding adds at most this share to their tokens."""
RUN_RATIO = 16
"""The longest sequence of a cuDNN call is at most so many times as long as its shortest may be."""
WORTH_A_CALL = 8
"""Fewer shorter sequences than this come along all the same."""
SHORTEST = 128
"""Tokens below which lengths make no difference to cuDNN."""


@dataclass(frozen=True)
class Run:
    """Sequences of similar lengths, for one call of cuDNN. Their count and longest length are rounded up, so that few
    different ones occur; what that adds has no tokens."""

    count: int
    """Sequences."""
    longest: int
    """No sequence is longer."""
    lengths: Tensor
    """int32 [count]: each one's tokens."""
    begins: Tensor
    """int64 [count + 1]: where each one begins in the spread-out tokens, and their number."""


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of a packed micro-batch are, in the forms that attention needs."""

    cu_seqlens: Tensor
    """int32 [sequences + 1]: where each sequence begins in the spread-out tokens, and their number."""
    longest: int
    """Tokens of the longest sequence."""
    kernel: AttentionKernel
    """How attention is computed."""
    blocks: tuple[tuple[int, int], ...]
    """(sequences, padded length) of each padded attention call."""
    runs: tuple[Run, ...]
    """The calls of cuDNN."""
    as_packed: bool
    """Whether the spread-out tokens are the packed ones as they lie, and nothing has to be moved."""
    spread: Tensor
    """int64 [P]: the token that goes to each place of the spread-out tokens, in which every sequence is whole, shared
    prompts repeated, and padded to its block (with any of its tokens)."""
    home: Tensor
    """int64 [T]: the place of each token in there; of a shared prompt's tokens the first."""
    shared: bool
    """Whether a token is in more than one sequence."""
    copies: Tensor
    """int64 [P]: all places of the first token, then of the second ..."""
    copies_begin: Tensor
    """int64 [T + 1]: where in `copies` each token's begin, and P."""
    router: RouterInputs
    """For the routers of a mixture of experts."""


def sequence_layout(
    batch: PackedMicroBatch, device: torch.device, kernel: AttentionKernel, router: RouterInputs | None = None
) -> SequenceLayout:
    """Lay out the sequences of a micro-batch.

    Args:
        batch: the micro-batch.
        device: where to put the indices.
        kernel: how attention is computed. Only "blocks" needs padding: sequences of similar length come into one padded
            block, so that there is one attention call and not one per sequence.
        router: for the routers of a mixture of experts.
    """
    begins, lengths_before = batch.prefixes[:, 0], batch.prefixes[:, 1]
    members = [
        np.concatenate((np.arange(prompt, prompt + shared), np.arange(begin, end)))
        for prompt, shared, (begin, end) in zip(begins, lengths_before, pairwise(batch.cu_seqlens), strict=True)
        if begin < end
    ]
    lengths = [len(member) for member in members]
    blocks = _blocks(lengths) if kernel == "blocks" else []
    order = [i for block in blocks for i in block] if blocks else list(range(len(members)))
    width_of = {i: lengths[block[0]] for block in blocks for i in block}
    padded = [np.pad(members[i], (0, width_of.get(i, lengths[i]) - lengths[i]), mode="wrap") for i in order]
    spread = np.concatenate(padded).astype(np.int64)
    home = np.empty(len(batch.tokens), np.int64)
    home[spread[::-1]] = np.arange(len(spread))[::-1]  # of several places the first, which is written last
    cu_seqlens = np.cumsum([0, *(len(member) for member in padded)])
    return SequenceLayout(
        to_device(cu_seqlens.astype(np.int32), device),
        max(lengths),
        kernel,
        tuple((len(block), lengths[block[0]]) for block in blocks),
        cudnn_runs(lengths, device) if kernel == "cudnn" else (),
        np.array_equal(spread, np.arange(len(batch.tokens))),
        to_device(spread, device),
        to_device(home, device),
        sum(lengths) > len(batch.tokens),
        to_device(np.argsort(spread, kind="stable"), device),
        to_device(np.cumsum([0, *np.bincount(spread, minlength=len(batch.tokens))]), device),
        router or RouterInputs(),
    )


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences of similar length, the longest first; equal ones in their order."""
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


def cudnn_runs(lengths: Sequence[int], device: torch.device) -> tuple[Run, ...]:
    """Calls of cuDNN for sequences that lie one after the other.

    A call starts programs for as many tokens as its longest sequence has, for each sequence; those of short ones have
    nothing to do. So a long sequence gets no company of much shorter ones.
    """
    begins, runs = np.cumsum([0, *lengths]), []
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while left:
        longest = max(rounded_up(lengths[left[0]], 2), SHORTEST)
        least = longest // RUN_RATIO if longest > SHORTEST else 0
        here = sorted(i for i in left if lengths[i] >= least)
        if len(left) - len(here) < WORTH_A_CALL:
            here = sorted(left)
        left = left[len(here) :]
        count = rounded_up(len(here), 4)
        of_run, places = np.zeros(count, np.int32), np.full(count + 1, begins[-1], np.int64)
        of_run[: len(here)], places[: len(here)] = [lengths[i] for i in here], begins[here]
        runs.append(Run(count, longest, to_device(of_run, device), to_device(places, device)))
    return tuple(runs)


def rounded_up(number: int, steps: int) -> int:
    """The next of few different numbers: so many between two powers of two; a power of two itself."""
    step = max((1 << (number - 1).bit_length()) // (2 * steps), 1)
    return -(-number // step) * step


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A numpy array as a tensor, copied to a GPU without waiting for what it is doing."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def spread_out(x: Tensor, layout: SequenceLayout, *, add_up: bool) -> Tensor:
    """x [T, ...] to [P, ...], its tokens spread out as in `layout`.

    Args:
        x: the packed tokens.
        layout: where they go.
        add_up: whether several places of one token send gradients back.
    """
    spread: Tensor = _Spread.apply(x, layout, add_up)
    return spread


def bring_home(x: Tensor, layout: SequenceLayout) -> Tensor:
    """x [P, ...] to [T, ...]: the tokens back in their packed order."""
    home: Tensor = _Home.apply(x, layout)
    return home


class _Spread(torch.autograd.Function):
    """x[spread], with a backward pass that looks up where it can.

    Padding comes last in its sequence and attention is causal, so no gradient comes back from there. Only tokens that
    are in several sequences have gradients to be added up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout, add_up: bool) -> Tensor:
        ctx.layout, ctx.add_up, ctx.shape = layout, add_up, x.shape
        return x.flatten(1).index_select(0, layout.spread).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        layout: SequenceLayout = ctx.layout
        grad = grads[0].flatten(1)
        if ctx.add_up and grad.dtype == torch.bfloat16 and fused_kernels():
            from services.trainer.kernels.layer_kernels import sum_copies

            total = sum_copies(grad.contiguous(), layout.copies, layout.copies_begin)
        elif ctx.add_up:
            total = grad.new_zeros(ctx.shape[0], grad.shape[1]).index_add_(0, layout.spread, grad)
        else:
            total = grad.index_select(0, layout.home)
        return total.view(ctx.shape), None, None


class _Home(torch.autograd.Function):
    """x[home]: the tokens back in their packed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.layout, ctx.shape = layout, x.shape
        return x.flatten(1).index_select(0, layout.home).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].flatten(1)
        return grad.new_zeros(ctx.shape[0], grad.shape[1]).index_copy_(0, ctx.layout.home, grad).view(ctx.shape), None
