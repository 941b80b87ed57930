"""Attention of a slice of a micro-batch's tokens, or of all: each query once, and the keys of all tokens before it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.transformer.attention.slots import Slots, to_device


@dataclass(frozen=True)
class QuerySlice:
    """The queries of consecutive tokens, in pieces: those of one sequence. A piece's keys end with its last query's."""

    lengths: tuple[tuple[int, int], ...]
    """Queries and keys of each piece."""
    cu_queries: Tensor
    """int32 [pieces + 1]: first query of each piece, and the slice's tokens."""
    cu_keys: Tensor
    """int32 [pieces + 1]: first slot of each piece, and the slots."""
    slots: Slots
    """The keys' slots, of all tokens of the row."""


def query_slice(
    sequences: Iterable[tuple[tuple[int, int], NDArray[np.int64]]],
    tokens: int,
    begin: int,
    end: int,
    device: torch.device,
) -> QuerySlice:
    """Make the slice of the tokens from `begin` to before `end`.

    Args:
        sequences: begin and end of each sequence's own tokens, one after the other, and the places of all its tokens.
        tokens: tokens of the row.
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
