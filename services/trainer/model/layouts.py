"""Layouts: how Hugging Face tensors are fused and sharded into one Megatron parameter, and back."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.trainer.model.architecture import Architecture


class ParameterLayout(Protocol):
    """Conversion between Hugging Face tensors (`parts`) and one Megatron parameter, sharded over `size` ranks."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's parameter."""

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the parts, of the given shapes, from all ranks' parameters in rank order."""


class Replicated:
    """Every rank has the whole of the single part."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return the part."""
        return parts[0]

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the first rank's parameter."""
        return [shards[0]]


class ShardedColumns:
    """Ranks have blocks of the single part's columns (Megatron's row-parallel linear layers)."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's columns."""
        return parts[0].chunk(size, dim=1)[rank]

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return all columns."""
        return [shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim=1)]


class ShardedRows:
    """Ranks have blocks of each part's rows, concatenated (column-parallel linear layers, gate and up, embeddings).

    If ranks don't divide the rows (of a vocabulary), the last ones are padded with zeros.
    """

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's rows of each part."""
        blocks = []
        for part in parts:
            rows = -(-part.shape[0] // size)
            block = part[rank * rows : (rank + 1) * rows]
            if block.shape[0] < rows:
                block = torch.cat((block, block.new_zeros(rows - block.shape[0], *part.shape[1:])))
            blocks.append(block)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return all rows of each part, without padding."""
        sizes = [-(-part[0] // len(shards)) for part in shapes]
        split = [shard.split(sizes) for shard in shards]
        parts = [split[0][i] if len(shards) == 1 else torch.cat([s[i] for s in split]) for i in range(len(shapes))]
        return [part[: full[0]] for part, full in zip(parts, shapes, strict=True)]


class QueryKeyValue:
    """Ranks have whole key-value heads, each preceded by its query heads: q q q k v, q q q k v ..."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's heads."""
        heads = [part.view(shape.kv_heads, -1, shape.head_size, part.shape[-1]) for part in parts]
        mine = torch.cat([part.chunk(size)[rank] for part in heads], dim=1)
        return mine.reshape(-1, mine.shape[-1])

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return queries, keys and values of all heads."""
        full = shards[0] if len(shards) == 1 else torch.cat(tuple(shards))
        return [part.reshape(-1, full.shape[-1]) for part in QueryKeyValue.heads(full, shape)]

    @staticmethod
    def heads(parameter: Tensor, shape: Architecture) -> Sequence[Tensor]:
        """Return views of the queries, keys and values of a whole parameter: [key-value head, head, size, hidden]."""
        per_group = shape.heads // shape.kv_heads
        return parameter.view(shape.kv_heads, per_group + 2, shape.head_size, -1).split([per_group, 1, 1], dim=1)


class QueryKeyValueBias:
    """The biases of `QueryKeyValue`, in the same order."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's heads."""
        return QueryKeyValue.shard([part.unsqueeze(-1) for part in parts], rank, size, shape).squeeze(-1)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return queries, keys and values of all heads."""
        merged = QueryKeyValue.merge([shard.unsqueeze(-1) for shard in shards], shapes, shape)
        return [part.squeeze(-1) for part in merged]


def views_of(
    layout: type[ParameterLayout], parameter: Tensor, shapes: Sequence[tuple[int, ...]], shape: Architecture
) -> Sequence[Tensor]:
    """Return views of a whole parameter that, reshaped, are what `merge` returns; none if that isn't views."""
    if layout is QueryKeyValue:
        return QueryKeyValue.heads(parameter, shape)
    parts = layout.merge([parameter], shapes, shape)
    memory = parameter.untyped_storage().data_ptr()
    return parts if all(part.untyped_storage().data_ptr() == memory for part in parts) else []
