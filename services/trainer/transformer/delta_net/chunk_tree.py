"""The chunks of a packed micro-batch in which a gated delta net computes, and the tokens before each token."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from services.trainer.batch.micro_batch import PackedMicroBatch

CHUNK = 64
"""Number of tokens that are computed together. The state passes from chunk to chunk."""


@dataclass(frozen=True)
class ChunkTree:
    """N chunks of T tokens. Each is within one sequence, and begins where its parent ends.

    Chunks without a parent begin a sequence. Those of a shared prompt have the first chunks of several responses as
    children, so that the prompt is computed once.
    """

    token_of_place: Tensor
    """int64 [N * CHUNK]: token in each place; T where a chunk is shorter."""
    place_of_token: Tensor
    """int64 [T]: place of each token."""
    levels: tuple[int, ...]
    """Number of chunks at each depth of the tree. Chunks are in this order, roots first."""
    parents: Tensor
    """int64 [N]: index of each chunk's parent within the previous level; 0 for roots."""
    ancestors: Tensor
    """int64 [A, T]: for each token its predecessor, that one's predecessor, and so on; T where a sequence has no
    more."""


def chunk_tree(batch: PackedMicroBatch, ancestors: int, device: torch.device) -> ChunkTree:
    """Cut a micro-batch's sequences into chunks.

    Args:
        batch: the micro-batch.
        ancestors: tokens before each token that its convolution reads.
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
