"""The layout of sequences in a packed micro-batch, and how tokens move to the places that attention needs.

Attention needs every sequence whole, so a shared prompt is repeated in front of each response, and some kernels need
padding. A *slot* is a place among these *scattered* tokens. Gated delta nets need sequences in chunks (`ChunkTree`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.transformer.context_parallel import ContextRanks
from services.trainer.transformer.kernels import fused_kernels
from services.trainer.transformer.routing import RouterInputs

CHUNK = 64
"""Maximum tokens of a chunk. A gated delta net computes a chunk at once, and passes its state to the next chunk."""


@dataclass(frozen=True)
class Slots:
    """Index maps between T packed tokens and P slots for attention. A shared prompt's tokens may have several slots."""

    token_of_slot: Tensor
    """Index of the token in each slot, int64 [P]."""
    slot_of_token: Tensor
    """First slot of each token, int64 [T]; 0 for tokens without a slot."""
    order: Tensor
    """Slots sorted by token, int64 [P]: all slots of the first token, then of the second, and so on."""
    order_begin: Tensor
    """Index in `order` at which each token's slots begin, then P: int64 [T + 1]."""

    @classmethod
    def of(cls, token_of_slot: NDArray[np.int64], tokens: int, device: torch.device) -> "Slots":
        """Create all index maps from `token_of_slot`, for `tokens` packed tokens."""
        slot_of_token = np.zeros(tokens, np.int64)
        slot_of_token[token_of_slot[::-1]] = np.arange(len(token_of_slot))[::-1]  # the last write wins: the first slot
        return cls(
            to_device(token_of_slot, device),
            to_device(slot_of_token, device),
            to_device(np.argsort(token_of_slot, kind="stable"), device),
            to_device(np.cumsum([0, *np.bincount(token_of_slot, minlength=tokens)]), device),
        )


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Convert a numpy array to a tensor on `device`. The copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True)
class ChunkTree:
    """Division of T packed tokens into N chunks, each within a sequence and beginning where its parent chunk ends.

    Chunks without a parent begin a sequence. A shared prompt's last chunk is the parent of several responses' first
    chunks, so that the prompt is computed once.
    """

    token_of_place: Tensor
    """Index of the token in each place, int64 [N * CHUNK]. Empty places of shorter chunks have index T."""
    place_of_token: Tensor
    """Place of each token in its chunk, counted over all chunks: int64 [T]."""
    levels: tuple[int, ...]
    """Number of chunks at each depth of the tree, roots first. Chunks are in this order."""
    parents: Tensor
    """Index of each chunk's parent within the previous level, int64 [N]; 0 for roots."""
    ancestors: Tensor
    """Indices of the A tokens before each token in its sequence, nearest first: int64 [A, T]. Index T stands for a
    place before the sequence's beginning."""


def chunk_tree(batch: PackedMicroBatch, ancestors: int, device: torch.device) -> ChunkTree:
    """Cut a micro-batch's sequences into chunks.

    Args:
        batch: the micro-batch.
        ancestors: number of previous tokens that a token's convolution reads.
        device: device of the indices.
    """
    tokens = len(batch.tokens)
    # Where shared prompts end, by the first token of the sequence that they are stored with.
    cuts: defaultdict[int, set[int]] = defaultdict(set)
    for begin, length in batch.prefixes.tolist():
        cuts[begin].add(begin + length)
    chunks: list[range] = []
    depths: list[int] = []
    parents: list[int] = []
    chunk_of_token = np.zeros(tokens, np.int64)
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        for first, last in pairwise(sorted({begin, end} | {cut for cut in cuts[begin] if begin < cut < end})):
            for start in range(first, last, CHUNK):
                before = int(batch.previous[start])
                parents.append(-1 if before < 0 else int(chunk_of_token[before]))
                depths.append(0 if before < 0 else depths[parents[-1]] + 1)
                chunk_of_token[start : min(start + CHUNK, last)] = len(chunks)
                chunks.append(range(start, min(start + CHUNK, last)))
    order = np.argsort(depths, kind="stable")
    levels = np.bincount(depths)
    place = np.empty(len(chunks), np.int64)
    place[order] = np.arange(len(chunks))
    first_of_level = np.cumsum([0, *levels])
    token_of_place = np.full((len(chunks), CHUNK), tokens, np.int64)
    for chunk, own in zip(place, chunks, strict=True):
        token_of_place[chunk, : len(own)] = own
    place_of_token = np.empty(tokens + 1, np.int64)
    place_of_token[token_of_place.ravel()] = np.arange(token_of_place.size)
    within = [
        place[parents[chunk]] - first_of_level[depths[chunk] - 1] if depths[chunk] else 0 for chunk in order.tolist()
    ]
    previous = np.append(np.where(batch.previous < 0, tokens, batch.previous), tokens)
    found = [previous]
    while len(found) < ancestors:
        found.append(previous[found[-1]])

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return ChunkTree(
        token_of_place=on_device(token_of_place.ravel()),
        place_of_token=on_device(place_of_token[:tokens]),
        levels=tuple(levels.tolist()),
        parents=on_device(np.array(within, np.int64)),
        ancestors=on_device(np.stack(found)[:ancestors, :tokens]),
    )


def scatter_to_sequences(x: Tensor, slots: Slots, *, sum_copies: bool) -> Tensor:
    """Copy packed tokens to their slots for attention: [T, ...] -> [P, ...].

    Args:
        x: the packed tokens.
        slots: maps between tokens and slots.
        sum_copies: sum the gradients of all slots of a token; otherwise only the first slot's gradient is used.
    """
    scattered: Tensor = _Scatter.apply(x, slots, sum_copies)
    return scattered


def gather_from_sequences(x: Tensor, slots: Slots) -> Tensor:
    """Copy tokens from their first slots back to packed order: [P, ...] -> [T, ...]."""
    gathered: Tensor = _Gather.apply(x, slots)
    return gathered


class _Scatter(torch.autograd.Function):
    """Autograd function of `scatter_to_sequences`. The backward pass is a lookup where possible.

    Padding comes last in its sequence and attention is causal, so padding has no gradient. Only tokens that are in
    several sequences have gradients to sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots, sum_copies: bool) -> Tensor:
        ctx.slots, ctx.sum_copies, ctx.shape = slots, sum_copies, x.shape
        return x.flatten(1).index_select(0, slots.token_of_slot).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        slots: Slots = ctx.slots
        grad = grads[0].flatten(1)
        if ctx.sum_copies and grad.dtype == torch.bfloat16 and fused_kernels():
            from services.trainer.transformer.kernels.layer_kernels import sum_copies

            total = sum_copies(grad.contiguous(), slots.order, slots.order_begin)
        elif ctx.sum_copies:
            total = grad.new_zeros(ctx.shape[0], grad.shape[1]).index_add_(0, slots.token_of_slot, grad)
        else:
            total = grad.index_select(0, slots.slot_of_token)
        return total.view(ctx.shape), None, None


class _Gather(torch.autograd.Function):
    """Autograd function of `gather_from_sequences`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots, ctx.shape = slots, x.shape
        return x.flatten(1).index_select(0, slots.slot_of_token).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].flatten(1)
        return grad.new_zeros(ctx.shape[0], grad.shape[1]).index_copy_(0, ctx.slots.slot_of_token, grad).view(
            ctx.shape
        ), None


@dataclass(frozen=True)
class QuerySlice:
    """The queries of consecutive tokens, and the keys that these attend to, as one piece per sequence.

    A piece's keys end with the token of its last query.
    """

    lengths: tuple[tuple[int, int], ...]
    """Numbers of queries and keys of each piece."""
    cu_queries: Tensor
    """First query of each piece, then the number of queries: int32 [pieces + 1]."""
    cu_keys: Tensor
    """First key slot of each piece, then the number of key slots: int32 [pieces + 1]."""
    slots: Slots
    """Slots of the keys. The tokens are numbered within the whole micro-batch."""


def query_slice(
    sequences: Iterable[tuple[tuple[int, int], NDArray[np.int64]]],
    tokens: int,
    begin: int,
    end: int,
    device: torch.device,
) -> QuerySlice:
    """Create the query slice of the tokens from `begin` to before `end`.

    Args:
        sequences: for each sequence, its own tokens' begin and end, and the places of all its tokens.
        tokens: number of tokens in the micro-batch.
        begin: first token of the slice.
        end: token after the slice.
        device: device of the indices.
    """
    lengths, keys = [], []
    for (own_begin, own_end), places in sequences:
        first, last = max(begin, own_begin), min(end, own_end)
        if first < last:
            keys.append(places[: len(places) - (own_end - last)])
            lengths.append((last - first, len(keys[-1])))
    cu_queries, cu_keys = np.cumsum([(0, 0), *lengths], axis=0, dtype=np.int32).T
    return QuerySlice(
        tuple(lengths),
        to_device(np.ascontiguousarray(cu_queries), device),
        to_device(np.ascontiguousarray(cu_keys), device),
        Slots.of(np.concatenate(keys), tokens, device),
    )


AttentionKernel = Literal["blocks", "varlen", "cudnn"]
"""Attention kernel: torch's scaled_dot_product_attention on padded blocks, torch's variable-length kernel, or cuDNN's
kernel for packed sequences."""
MAX_PADDING = 0.25
"""Maximum ratio of padding tokens to other tokens in a padded attention call."""
MAX_LENGTH_RATIO = 16
"""Maximum ratio of the longest to the shortest sequence in one cuDNN call."""
MIN_SEQUENCES = 8
"""Minimum number of shorter sequences that get a separate cuDNN call."""
MIN_LENGTH = 128
"""Sequence length, in tokens, up to which cuDNN's time doesn't depend on the length."""
MIN_SAVING: dict[AttentionKernel, float] = {"cudnn": 3.0, "varlen": 1.25, "blocks": 1.25}
"""Minimum saving, by kernel, for which a shared prompt's queries are computed only once. The saving is attention's work
with a prompt copy per sample, divided by the work without copies. On GPUs, torch's kernel computes prompts once: in a
probe it reached 247 to 330 TFLOP/s, and cuDNN's 577 to 597."""


@dataclass(frozen=True)
class CudnnBatch:
    """Sequences of similar lengths for one cuDNN call.

    Count and longest length are rounded up, so that few distinct shapes occur. Added sequences are empty.
    """

    count: int
    """Number of sequences, including added empty sequences."""
    longest: int
    """Upper bound of the sequences' lengths, in tokens."""
    lengths: Tensor
    """Length of each sequence in tokens, int32 [count]."""
    begins: Tensor
    """First slot of each sequence, then the number of slots: int64 [count + 1]."""


@dataclass(frozen=True)
class DeepStack:
    """DeepStack (arXiv 2406.04334): rows of the vision tower that the first layers add to the hidden states."""

    places: Tensor
    """Index of each of the M rows' token in this rank's slice, int64 [M]."""
    rows: Sequence[Tensor]
    """Rows to add after each of the first layers, [M, hidden] each."""

    def add(self, hidden: Tensor, layer: int) -> Tensor:
        """Return a layer's output [T, 1, hidden] plus the layer's rows; `layer` counts from 0 over the whole model."""
        if layer >= len(self.rows):
            return hidden
        return hidden.index_add(0, self.places, self.rows[layer].unsqueeze(1).to(hidden.dtype))


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """Places of the sequences in a micro-batch of T tokens and P slots, in the forms that attention kernels need."""

    cu_seqlens: Tensor
    """First slot of each sequence, then P: int32 [sequences + 1]."""
    longest: int
    """Length of the longest sequence, in tokens."""
    kernel: AttentionKernel
    """Attention kernel that the layers use."""
    blocks: tuple[tuple[int, int], ...]
    """Number of sequences and padded length in tokens of each padded attention call, for the kernel "blocks"."""
    cudnn_batches: tuple[CudnnBatch, ...]
    """Sequences of each cuDNN call, for the kernel "cudnn"."""
    as_packed: bool
    """True if slots equal packed tokens, so that no token has to be moved."""
    slots: Slots
    """Maps between packed tokens and slots. Repeated tokens pad a sequence to the length of its block."""
    shared: bool
    """True if any token is in more than one sequence."""
    query_slice: QuerySlice | None
    """The queries of this rank's tokens, each once, if ranks divide queries or samples share long prompts. Attention
    then uses this instead of the fields above. None: attention uses the fields above."""
    context: ContextRanks
    """Process groups of the ranks with which this rank shares attention."""
    router: RouterInputs
    """Inputs of the expert routers, in models with experts."""
    chunks: ChunkTree | None
    """Chunks of the sequences, in models with gated delta nets; None in others."""
    deepstack: DeepStack | None = None
    """Rows of the vision tower that the first layers add to the hidden states; None without media."""


def sequence_layout(
    batch: PackedMicroBatch,
    device: torch.device,
    kernel: AttentionKernel,
    router: RouterInputs | None = None,
    context: ContextRanks | None = None,
    *,
    prompts_once: bool = False,
    convolution: int = 0,
) -> SequenceLayout:
    """Compute the layout of a micro-batch's sequences.

    Args:
        batch: the micro-batch.
        device: device of the indices.
        kernel: attention kernel. Only "blocks" needs padding: sequences of similar length share a padded block and an
            attention call.
        router: inputs of the expert routers, in models with experts.
        context: process groups of the ranks that share attention and divide the tokens, if there are any.
        prompts_once: compute the queries of shared prompts once if that saves at least MIN_SAVING.
        convolution: tokens that a token's convolution reads in gated delta nets, itself included; 0: there are none.
    """
    context = context or ContextRanks()
    owned = {i: (begin, end) for i, (begin, end) in enumerate(pairwise(batch.cu_seqlens.tolist())) if begin < end}
    members = [batch.places_of(i) for i in owned]
    lengths = [len(member) for member in members]
    once = prompts_once and _saving(lengths, [end - begin for begin, end in owned.values()]) >= MIN_SAVING[kernel]
    sequences = list(zip(owned.values(), members, strict=True))
    blocks = _blocks(lengths) if kernel == "blocks" else []
    order = [i for block in blocks for i in block] if blocks else list(range(len(members)))
    width_of = {i: lengths[block[0]] for block in blocks for i in block}
    padded = [np.pad(members[i], (0, width_of.get(i, lengths[i]) - lengths[i]), mode="wrap") for i in order]
    token_of_slot = np.concatenate(padded).astype(np.int64)
    cu_seqlens = np.cumsum([0, *(len(member) for member in padded)])
    queries = None
    if once or context.gathering is not None:  # this rank's tokens: all, unless ranks gather keys and values
        share, rank = (1, 0) if context.gathering is None else (context.gathering.size(), context.gathering.rank())
        here = len(batch.tokens) // share
        queries = query_slice(sequences, len(batch.tokens), rank * here, (rank + 1) * here, device)
    return SequenceLayout(
        cu_seqlens=to_device(cu_seqlens.astype(np.int32), device),
        longest=max(lengths),
        kernel=kernel,
        blocks=tuple((len(block), lengths[block[0]]) for block in blocks),
        cudnn_batches=cudnn_batches(lengths, device) if kernel == "cudnn" else (),
        as_packed=np.array_equal(token_of_slot, np.arange(len(batch.tokens))),
        slots=Slots.of(token_of_slot, len(batch.tokens), device),
        shared=sum(lengths) > len(batch.tokens),
        query_slice=queries,
        context=context,
        router=router or RouterInputs(),
        chunks=chunk_tree(batch, convolution - 1, device) if convolution else None,
    )


def _saving(lengths: Sequence[int], own_lengths: Sequence[int]) -> float:
    """Return the number of query-key pairs with repeated prompts, divided by the number with each query once.

    Args:
        lengths: tokens of each sequence.
        own_lengths: tokens stored with each sequence, without prompts stored elsewhere.
    """
    whole, own = np.array(lengths, np.float64), np.array(own_lengths, np.float64)
    return float((whole**2).sum() / (own * (2 * whole - own)).sum())


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences of similar length into blocks for padding. Return their indices, longest sequence first."""
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
    """Divide sequences by length among cuDNN calls.

    A call starts the same number of programs for each sequence, enough for the longest; most of a short sequence's
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
    """Round up to the next of `steps` evenly spaced numbers between consecutive powers of two."""
    step = max((1 << (number - 1).bit_length()) // (2 * steps), 1)
    return -(-number // step) * step
