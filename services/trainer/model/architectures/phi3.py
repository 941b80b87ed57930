"""Phi-3 and Phi-4 (not Phi-4-mini): Llama, with queries, keys and values in one tensor, gate and up in another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.trainer.model.architecture import Architecture, ModelError
from services.trainer.model.family import (
    DOWN,
    NORMS,
    OUTPUT,
    Config,
    Family,
    QueryKeyValue,
    ShardedRows,
    decoder,
    layer_rule,
    windows,
)


def read(config: Config) -> Architecture:
    """Read the architecture from a Phi-3 config.json."""
    layer = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
    shape = decoder(config, **windows(config, [layer] * config["num_hidden_layers"]))
    if shape.rope.scaling != "default":  # Phi's "yarn" is LongRoPE
        raise ModelError(f'rope_type is "{shape.rope.scaling}": only "default" is supported')
    return shape


class FusedQueryKeyValue:
    """Layout `QueryKeyValue`, read from one fused tensor: all queries, then all keys, then all values."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's query, key and value rows of the fused tensor."""
        query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        return QueryKeyValue.shard(parts[0].split([query, kv, kv]), rank, size, shape)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the fused tensor: all queries, then all keys, then all values."""
        return [torch.cat(QueryKeyValue.merge(shards, shapes, shape))]


class FusedGateUp:
    """Layout `ShardedRows`, read from one fused tensor: all rows of gate, then those of up."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's gate and up rows of the fused tensor."""
        return ShardedRows.shard(parts[0].chunk(2), rank, size, shape)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the fused tensor: all rows of gate, then those of up."""
        rows, columns = shapes[0]
        return [torch.cat(ShardedRows.merge(shards, [(rows // 2, columns)] * 2, shape))]


QKV = layer_rule(
    "self_attention.linear_qkv.weight", FusedQueryKeyValue, {"self_attn.qkv_proj.weight": "query+kv+kv hidden"}
)
GATE_UP = layer_rule("mlp.linear_fc1.weight", FusedGateUp, {"mlp.gate_up_proj.weight": "ffn+ffn hidden"})

FAMILY = Family(read, rules=lambda shape, layer: (*NORMS, QKV, OUTPUT, GATE_UP, DOWN))
