"""A key-value cache whose rows are added and removed while it grows."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

_MIN_GROWTH = 64
"""Minimum number of tokens by which a buffer grows."""


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [rows, heads, length, dim], as views into buffers with room for more tokens.

    transformers' own dynamic layer copies the whole cache for every token.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens. Returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._grow(start, end + max(_MIN_GROWTH, end // 4), key_states, value_states)
        assert self._buffers is not None
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace all keys and values."""
        self._buffers = None
        self.keys, self.values = keys, values

    def _grow(self, length: int, capacity: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads = key_states.shape[:2]
        keys = key_states.new_empty((rows, heads, capacity, key_states.shape[-1]))
        values = value_states.new_empty((rows, heads, capacity, value_states.shape[-1]))
        if length:
            keys[:, :, :length] = self.keys
            values[:, :, :length] = self.values
        self._buffers = (keys, values)


def empty_cache() -> Cache:
    """Return an empty cache."""
    return Cache(layer_class_to_replicate=GrowingLayer)


def take_rows(cache: Cache, rows: Sequence[int], cut: int = 0) -> None:
    """Keep these rows, in this order (a row may be taken several times), without their first `cut` positions."""
    index = torch.tensor(rows, dtype=torch.long, device=cache.layers[0].keys.device)
    for layer in cache.layers:
        keys = layer.keys[:, :, cut:].index_select(0, index)
        layer.replace(keys, layer.values[:, :, cut:].index_select(0, index))


def append_rows(cache: Cache, other: Cache) -> None:
    """Append the rows of `other`. The shorter cache is padded on the left with zeros, which callers must mask."""
    length = max(cache.get_seq_length(), other.get_seq_length())
    for layer, added in zip(cache.layers, other.layers, strict=True):
        layer.replace(_stack(layer.keys, added.keys, length), _stack(layer.values, added.values, length))


def _stack(above: torch.Tensor, below: torch.Tensor, length: int) -> torch.Tensor:
    heads, dim = above.shape[1], above.shape[3]
    stacked = above.new_zeros((above.shape[0] + below.shape[0], heads, length, dim))
    stacked[: above.shape[0], :, length - above.shape[2] :] = above
    stacked[above.shape[0] :, :, length - below.shape[2] :] = below
    return stacked
