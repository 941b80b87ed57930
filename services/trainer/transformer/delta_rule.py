"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464) and the convolution before it, in torch's operations.

A head has a state S, [key_size, value_size], which is zero at the beginning of a sequence. With a token's key k, value
v, decay a = exp(log_decay) and strength b, equation 10 there, transposed, is

    S <- a (I - b k k^T) S + b k v^T,    output = S^T q.

Within a chunk, with products c of the decays up to each token, the changes of the state solve a triangular system (the
UT transform of arXiv 2406.06484, equations 10 and 11, with the decays of section 3.3 of 2412.06464):

    (I + lower(diag(b) (K K^T * C))) [U, W] = diag(b) [V, diag(c) K],    C_ij = c_i / c_j,

    outputs = diag(c) Q S + lower(Q K^T * C) (U - W S),    S <- c_last S + (diag(c_last / c) K)^T (U - W S).
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.batch.micro_batch import PackedMicroBatch

CHUNK = 64
"""Maximum tokens of a chunk, which are computed together. The state passes from chunk to chunk."""


@dataclass(frozen=True)
class ChunkTree:
    """N chunks of T tokens. Each is within one sequence, and begins where its parent ends.

    Chunks without a parent begin a sequence. A shared prompt's last chunk is the parent of several responses' first
    chunks, so that the prompt is computed once.
    """

    token_of_place: Tensor
    """int64 [N * CHUNK]: token in each place; T in the empty places of shorter chunks."""
    place_of_token: Tensor
    """int64 [T]: place of each token."""
    levels: tuple[int, ...]
    """Number of chunks at each depth of the tree. Chunks are in this order, roots first."""
    parents: Tensor
    """int64 [N]: index of each chunk's parent within the previous level; 0 for roots."""
    ancestors: Tensor
    """int64 [A, T]: indices of the A tokens before each token in its sequence, nearest first. The index T stands for a
    missing token, before the beginning of a sequence."""


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


def causal_convolution(x: Tensor, weight: Tensor, tree: ChunkTree) -> Tensor:
    """Convolve each channel within each sequence, with zeros before the first token.

    Args:
        x: [T, channels].
        weight: [channels, width]; the last column is for the token itself.
        tree: the sequences, with width - 1 ancestors.

    Returns:
        [T, channels].
    """
    padded = _with_zeros(x)
    output = x * weight[:, -1]
    for number, before in enumerate(tree.ancestors):
        output = output + padded.index_select(0, before) * weight[:, -2 - number]
    return output


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, tree: ChunkTree
) -> Tensor:
    """Compute the outputs of all tokens, each sequence from a state of zeros.

    A key head serves several value heads, each of which has a state.

    Args:
        query: [T, key_heads, key_size], scaled.
        key: [T, key_heads, key_size], of norm 1.
        value: [T, key_heads, values, value_size].
        log_decay: [T, key_heads, values], at most 0.
        strength: [T, key_heads, values], between 0 and 1.
        tree: the sequences' chunks.

    Returns:
        [T, key_heads, values, value_size].
    """
    query, key = (_in_chunks(x, tree).transpose(1, 2).unsqueeze(2) for x in (query, key))  # [N, heads, 1, CHUNK, size]
    value = _in_chunks(value, tree).permute(0, 2, 3, 1, 4)  # [N, heads, values, CHUNK, size]
    log_decay, strength = (_in_chunks(x, tree).permute(0, 2, 3, 1) for x in (log_decay, strength))
    total = log_decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    grown, strength = total.exp().unsqueeze(-1), strength.unsqueeze(-1)
    # The diagonal isn't read: `unitriangular` takes it as 1.
    system = strength * (key @ key.mT) * ratios
    sides = torch.cat((strength * value, strength * grown * key), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    within = (query @ key.mT) * ratios
    query = grown * query
    written_keys = (total[..., -1:] - total).exp().unsqueeze(-1) * key
    kept = grown[..., -1:, :]

    outputs: list[Tensor] = []
    state: Tensor | None = None
    parts = zip(
        *(x.split(tree.levels) for x in (new_values, read_keys, within, query, written_keys, kept)), strict=True
    )
    for (new, read, inside, asked, written, left), parents in zip(parts, tree.parents.split(tree.levels), strict=True):
        if state is None:
            outputs.append(inside @ new)
            state = written.mT @ new
        else:
            state = state.index_select(0, parents)
            new = new - read @ state
            outputs.append(asked @ state + inside @ new)
            state = left * state + written.mT @ new
    in_places = torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return in_places.index_select(0, tree.place_of_token)


def unit(x: Tensor) -> Tensor:
    """Scale each head of x [..., size] to norm 1; a head of zeros stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, epsilon: float) -> Tensor:
    """Normalise heads and multiply them by silu(gate): x and gate [..., size], weight [size]."""
    return functional.rms_norm(x, weight.shape, weight, epsilon) * functional.silu(gate)


def _in_chunks(x: Tensor, tree: ChunkTree) -> Tensor:
    """Return tokens in chunks, with zeros in empty places: [T, ...] -> [N, CHUNK, ...]."""
    return _with_zeros(x).index_select(0, tree.token_of_place).unflatten(0, (-1, CHUNK))


def _with_zeros(x: Tensor) -> Tensor:
    """Append a row of zeros, which index T refers to."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))
