"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts with a shared one in all.

The heads that predict further tokens (`mtp.`) are not trained, sent or exported.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relaxd.models.shape import read_delta_net
from services.trainer.model.architecture import Architecture, ModelError
from services.trainer.model.family import (
    NORMS,
    Config,
    Family,
    Replicated,
    Rule,
    ShardedColumns,
    ShardedRows,
    attention_rules,
    decoder,
    experts,
    layer_rule,
    mlp_rules,
    refuse,
)


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3-Next config.json."""
    config = {"num_key_value_heads": 2, "norm_topk_prob": True, **config}
    return hybrid(config, experts=experts(config, config["shared_expert_intermediate_size"]))


def hybrid(config: Config, **switches: Any) -> Architecture:
    """Read the architecture of a decoder with gated delta nets and gated attention.

    `switches`: further fields of `Architecture`.
    """
    refuse(config, attention_bias=False)
    config = {"head_dim": 256, "partial_rotary_factor": 0.25, **config}
    try:
        delta_net = read_delta_net(config)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return decoder(
        config,
        partial_rotary=True,
        qk_norm=True,
        output_gate=True,
        zero_centred_norms=True,
        delta_net=delta_net,
        **switches,
    )


class KeyHeads:
    """Layout that gives each rank whole key heads of a gated delta net. A head's rows of all parts are together."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's key heads: for each head, the rows of all parts."""
        heads = [part.reshape(_key_heads(shape), -1, part.shape[-1]) for part in parts]
        return torch.cat([part.chunk(size)[rank] for part in heads], dim=1).flatten(0, 1)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return all parts whole, from the key heads of all ranks."""
        full = torch.cat(tuple(shards)).unflatten(0, (_key_heads(shape), -1))
        parts = full.split([one[0] // _key_heads(shape) for one in shapes], dim=1)
        return [part.reshape(one) for part, one in zip(parts, shapes, strict=True)]


class FusedKeyHeads:
    """Layout `KeyHeads`, with a fused tensor as first part: all queries, then all keys, then all values."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's key heads of the fused tensor and the other parts."""
        return KeyHeads.shard([*parts[0].split(_widths(shape)), *parts[1:]], rank, size, shape)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the fused tensor and the other parts, whole."""
        separate = [(width, *shapes[0][1:]) for width in _widths(shape)]
        query, key, value, *others = KeyHeads.merge(shards, [*separate, *shapes[1:]], shape)
        return [torch.cat((query, key, value)), *others]


def _widths(shape: Architecture) -> list[int]:
    assert shape.delta_net is not None
    return [shape.delta_net.keys, shape.delta_net.keys, shape.delta_net.values]


def _key_heads(shape: Architecture) -> int:
    assert shape.delta_net is not None
    return shape.delta_net.key_heads


INPUT = layer_rule(
    "self_attention.linear_in.weight",
    KeyHeads,
    {
        "linear_attn.in_proj_qkvz.weight": "delta_keys+delta_keys+delta_values+delta_values hidden",
        "linear_attn.in_proj_ba.weight": "delta_heads+delta_heads hidden",
    },
)
DELTA_NET = tuple(
    layer_rule(f"self_attention.{name}", layout, {f"linear_attn.{theirs}": sizes})
    for name, layout, theirs, sizes in (
        ("convolution", FusedKeyHeads, "conv1d.weight", "delta_keys+delta_keys+delta_values one convolution"),
        ("A_log", ShardedRows, "A_log", "delta_heads"),
        ("dt_bias", ShardedRows, "dt_bias", "delta_heads"),
        ("norm", Replicated, "norm.weight", "delta_value"),
        ("linear_out.weight", ShardedColumns, "out_proj.weight", "hidden delta_values"),
    )
)
"""Tensor rules of a gated delta net, except for its input projection."""


def rules(shape: Architecture, layer: int, projection: Rule = INPUT) -> tuple[Rule, ...]:
    """Return a layer's tensor rules. `projection`: the rule of a delta net's input projection."""
    assert shape.delta_net is not None
    attention = (projection, *DELTA_NET) if shape.delta_net.layers[layer] else attention_rules(shape)
    return (*NORMS, *attention, *mlp_rules(shape))


FAMILY = Family(read, rules=rules)
