"""A family of models: how to read a config.json, and which tensors a layer has.

A tensor rule says which Hugging Face tensors make up a Megatron parameter, how to fuse and shard them, and how to
restore them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from services.trainer.model.architecture import Architecture, ExpertArchitecture, ModelError, read_rope


class ParameterLayout(Protocol):
    """Conversion between Hugging Face tensors (`parts`) and one Megatron parameter, sharded over `size` ranks."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return the Megatron parameter of rank `rank`, built from the Hugging Face tensors."""

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the Hugging Face tensors, of the given shapes, from the parameters of all ranks in order."""


class Replicated:
    """Layout that copies one Hugging Face tensor whole to every rank."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return the tensor unchanged."""
        return parts[0]

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the tensor of the first rank; all ranks have the same."""
        return [shards[0]]


class ShardedColumns:
    """Layout that gives each rank a block of columns of one tensor, as Megatron's row-parallel linear layers need."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's columns of the tensor."""
        return parts[0].chunk(size, dim=1)[rank]

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the whole matrix: the columns of all ranks side by side."""
        return [shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim=1)]


class ShardedRows:
    """Layout that gives each rank a block of rows of every part (column-parallel layers, gate and up, embeddings).

    If the number of ranks doesn't divide the rows (of a vocabulary), zeros pad the last ranks' blocks.
    """

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's rows of every part, one part after the other."""
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
    """Layout that gives each rank whole key-value heads, each after its query heads: q q q k v, q q q k v ..."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's query, key and value heads, as one matrix."""
        heads = [part.view(shape.kv_heads, -1, shape.head_size, part.shape[-1]) for part in parts]
        mine = torch.cat([part.chunk(size)[rank] for part in heads], dim=1)
        return mine.reshape(-1, mine.shape[-1])

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the query, key and value matrices of all heads."""
        full = shards[0] if len(shards) == 1 else torch.cat(tuple(shards))
        return [part.reshape(-1, full.shape[-1]) for part in QueryKeyValue.heads(full, shape)]

    @staticmethod
    def heads(parameter: Tensor, shape: Architecture) -> Sequence[Tensor]:
        """Return views of queries, keys and values in an unsharded parameter: [key-value head, head, size, hidden].

        A query's output gate counts as a query.
        """
        per_group = shape.heads // shape.kv_heads * (2 if shape.output_gate else 1)
        return parameter.view(shape.kv_heads, per_group + 2, shape.head_size, -1).split([per_group, 1, 1], dim=1)


class QueryKeyValueBias:
    """Layout of the query, key and value biases, in the order of `QueryKeyValue`."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's query, key and value biases, as one vector."""
        return QueryKeyValue.shard([part.unsqueeze(-1) for part in parts], rank, size, shape).squeeze(-1)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return the query, key and value biases of all heads."""
        merged = QueryKeyValue.merge([shard.unsqueeze(-1) for shard in shards], shapes, shape)
        return [part.squeeze(-1) for part in merged]


def views_of(
    layout: type[ParameterLayout], parameter: Tensor, shapes: Sequence[tuple[int, ...]], shape: Architecture
) -> Sequence[Tensor]:
    """Return the Hugging Face tensors of an unsharded parameter as views, up to a reshape; [] if that needs copies."""
    if layout is QueryKeyValue:
        return QueryKeyValue.heads(parameter, shape)
    parts = layout.merge([parameter], shapes, shape)
    memory = parameter.untyped_storage().data_ptr()
    return parts if all(part.untyped_storage().data_ptr() == memory for part in parts) else []


@dataclass(frozen=True)
class Rule:
    """Tensor rule: maps a Megatron parameter to the Hugging Face tensors that make it up."""

    megatron: str
    """Name of the Megatron parameter; {layer} counts within the stage, or one of its chunks."""
    layout: type[ParameterLayout]
    """Layout that fuses and shards the parameter."""
    parts: tuple[tuple[str, str], ...]
    """Hugging Face tensors: name ({layer} and {expert} count over the whole model) and shape, as names of
    sizes (`parameter_entries.py`) and their sums, such as "query+kv+kv hidden"."""
    exported: bool = True
    """True if this rule exports the tensor; False if another rule does."""
    stacked: bool = False
    """True if the files stack a layer's experts in one tensor, so that an expert's tensors are slices of it."""


LAYER, HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_EMBEDDING = ("model.embed_tokens.weight", "vocab hidden")

FIRST = (Rule("embedding.word_embeddings.weight", ShardedRows, (_EMBEDDING,)),)
"""Tensor rule of the embedding, on the first pipeline stage."""

LAST = (Rule("decoder.final_layernorm.weight", Replicated, (("model.norm.weight", "hidden"),)),)
"""Tensor rule of the final norm, on the last pipeline stage."""

LAST_UNTIED = (Rule("output_layer.weight", ShardedRows, (("lm_head.weight", "vocab hidden"),)),)
"""Tensor rule of an untied output layer, on the last pipeline stage."""

LAST_TIED = (Rule("output_layer.weight", ShardedRows, (_EMBEDDING,), exported=False),)
"""Tensor rule of the last stage's copy of a tied embedding; unused with a single pipeline stage."""


def layer_rule(megatron: str, layout: type[ParameterLayout], parts: Mapping[str, str]) -> Rule:
    """Return a tensor rule of a layer. `megatron` and the keys of `parts` are names within the layer."""
    named = tuple((f"{HF_LAYER}.{name}", sizes) for name, sizes in parts.items())
    return Rule(f"{LAYER}.{megatron}", layout, named)


NORMS = (
    layer_rule("input_layernorm.weight", Replicated, {"input_layernorm.weight": "hidden"}),
    layer_rule("pre_mlp_layernorm.weight", Replicated, {"post_attention_layernorm.weight": "hidden"}),
)
"""Tensor rules of the norms before attention and MLP."""


def _qkv(queries: str) -> Rule:
    sizes = {"q": queries, "k": "kv", "v": "kv"}
    parts = {f"self_attn.{x}_proj.weight": f"{size} hidden" for x, size in sizes.items()}
    return layer_rule("self_attention.linear_qkv.weight", QueryKeyValue, parts)


QKV = _qkv("query")
"""Tensor rule of the projection to queries, keys and values."""
GATED_QKV = _qkv("query+query")
"""Tensor rule of the projection to queries, keys and values, with an output gate after each query head."""
QK_NORM = tuple(
    layer_rule(f"self_attention.{x}_layernorm.weight", Replicated, {f"self_attn.{x}_norm.weight": "head"}) for x in "qk"
)
"""Tensor rules of the query and key norms."""
QKV_BIAS = layer_rule(
    "self_attention.linear_qkv.bias",
    QueryKeyValueBias,
    {"self_attn.q_proj.bias": "query", "self_attn.k_proj.bias": "kv", "self_attn.v_proj.bias": "kv"},
)
"""Tensor rule of the fused bias of the query, key and value projections."""
OUTPUT = layer_rule("self_attention.linear_proj.weight", ShardedColumns, {"self_attn.o_proj.weight": "hidden query"})
"""Tensor rule of attention's output projection."""
OUTPUT_BIAS = layer_rule("self_attention.linear_proj.bias", Replicated, {"self_attn.o_proj.bias": "hidden"})
"""Tensor rule of the output projection's bias in attention."""


def _gate_up(megatron: str, mlp: str, width: str) -> Rule:
    parts = {f"{mlp}.{x}_proj.weight": f"{width} hidden" for x in ("gate", "up")}
    return layer_rule(megatron, ShardedRows, parts)


GATE_UP = _gate_up("mlp.linear_fc1.weight", "mlp", "ffn")
"""Tensor rule of a dense MLP's first matrix, which fuses gate and up."""
DOWN = layer_rule("mlp.linear_fc2.weight", ShardedColumns, {"mlp.down_proj.weight": "hidden ffn"})
"""Tensor rule of a dense MLP's second matrix (down)."""
ROUTER = layer_rule("mlp.router.weight", Replicated, {"mlp.gate.weight": "experts hidden"})
"""Tensor rule of the matrix that routes tokens to experts."""
EXPERT = (
    _gate_up("mlp.experts.linear_fc1", "mlp.experts.{expert}", "expert_ffn"),
    layer_rule(
        "mlp.experts.linear_fc2", ShardedColumns, {"mlp.experts.{expert}.down_proj.weight": "hidden expert_ffn"}
    ),
)
"""Tensor rules of one expert, a slice of the parameters that hold all experts of a rank."""
SHARED_EXPERT = (
    _gate_up("mlp.shared_expert.linear_fc1.weight", "mlp.shared_expert", "shared_ffn"),
    layer_rule(
        "mlp.shared_expert.linear_fc2.weight",
        ShardedColumns,
        {"mlp.shared_expert.down_proj.weight": "hidden shared_ffn"},
    ),
    layer_rule("mlp.shared_expert_gate.weight", Replicated, {"mlp.shared_expert_gate.weight": "one hidden"}),
)
"""Tensor rules of the shared expert and its gate."""


def stacked_expert(
    gate_up: tuple[type[ParameterLayout], str], *, down: tuple[type[ParameterLayout], str]
) -> tuple[Rule, ...]:
    """Return the tensor rules of one expert, for files that stack a layer's experts in one tensor.

    `gate_up` and `down`: layout and shape of one expert's part of each tensor.
    """
    products = {"linear_fc1": ("gate_up_proj", *gate_up), "linear_fc2": ("down_proj", *down)}
    return tuple(
        replace(layer_rule(f"mlp.experts.{megatron}", layout, {f"mlp.experts.{name}": part}), stacked=True)
        for megatron, (name, layout, part) in products.items()
    )


def layer_rules(shape: Architecture, layer: int) -> tuple[Rule, ...]:
    """Return the tensor rules of a layer with Llama's names, except those of routed experts."""
    return (*NORMS, *attention_rules(shape), *mlp_rules(shape))


def attention_rules(shape: Architecture) -> tuple[Rule, ...]:
    """Return the tensor rules of a layer's attention."""
    return (
        GATED_QKV if shape.output_gate else QKV,
        OUTPUT,
        *(QK_NORM if shape.qk_norm else ()),
        *([QKV_BIAS] if shape.qkv_bias else ()),
        *([OUTPUT_BIAS] if shape.output_bias else ()),
    )


def mlp_rules(shape: Architecture) -> tuple[Rule, ...]:
    """Return the tensor rules of a layer's MLP, except those of routed experts."""
    experts = shape.experts
    return (
        *([GATE_UP, DOWN] if experts is None else [ROUTER]),
        *(SHARED_EXPERT if experts is not None and experts.shared_ffn_size is not None else ()),
    )


Config = dict[str, Any]
"""The parsed content of a config.json."""


@dataclass(frozen=True)
class Family:
    """A family of models: those of one Hugging Face `model_type`."""

    read: Callable[[Config], Architecture]
    """Function that reads a config.json, mostly with `decoder`. Raises ModelError, or KeyError for a missing field."""
    rules: Callable[[Architecture, int], tuple[Rule, ...]] = layer_rules
    """Function that returns a layer's tensor rules, except those of its routed experts. Layers are numbered from 0 over
    the whole model."""
    expert_rules: tuple[Rule, ...] = EXPERT
    """Tensor rules of one routed expert."""
    prefix: str = "model."
    """Prefix of the decoder's tensor names in Hugging Face's files."""
    outer: str = ""
    """Prefix of the output layer's tensor name in Hugging Face's files."""


def decoder(config: Config, *, partial_rotary: bool = False, **switches: Any) -> Architecture:
    """Read an architecture from the config.json fields that all families have in common.

    Args:
        config: the config.json. Where a family's defaults differ from Llama's, pass `{"name": default, **config}`.
        partial_rotary: whether `partial_rotary_factor` may be less than 1.
        switches: fields of `Architecture` that the family reads itself.

    Raises:
        ModelError: a field has a value that isn't supported.
        KeyError: a field is missing.
    """
    refuse(config, mlp_bias=False, hidden_act="silu")
    if config.get("quantization_config"):
        raise ModelError("quantization_config: the weights are quantised. Train the unquantised model")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads is {kv_heads}: it must divide num_attention_heads, which is {heads}")
    return Architecture(
        model_type=config["model_type"],
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        ffn_size=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_size(config, "head_dim") if config.get("head_dim") else _size(config, "hidden_size") // heads,
        norm_epsilon=config["rms_norm_eps"],
        max_positions=_size(config, "max_position_embeddings"),
        tied_embeddings=config.get("tie_word_embeddings", False),
        rope=read_rope(config, partial=partial_rotary),
        **switches,
    )


def experts(config: Config, shared_ffn_size: int | None = None) -> ExpertArchitecture:
    """Read the architecture of the routed experts from a Qwen config.json.

    Raises:
        ModelError: some layers have no experts.
        KeyError: a field is missing.
    """
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            "mlp_only_layers and decoder_sparse_step: only models with experts in every layer are supported"
        )
    return ExpertArchitecture(
        # Two names exist for the count.
        count=_size(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        per_token=_size(config, "num_experts_per_tok"),
        ffn_size=_size(config, "moe_intermediate_size"),
        normalize=config.get("norm_topk_prob", False),
        shared_ffn_size=shared_ffn_size,
    )


def windows(config: Config, layer_types: Sequence[str]) -> dict[str, Any]:
    """Return the fields `window` and `windowed` of `Architecture`.

    Args:
        config: the config.json, whose `sliding_window` is the window.
        layer_types: "sliding_attention" or "full_attention" for each layer.

    Raises:
        ModelError: a layer has another type, the number of types is wrong, or there is no window.
    """
    if other := sorted(set(layer_types) - {"sliding_attention", "full_attention"}):
        raise ModelError(f'layer_types has {other}: supported are "full_attention" and "sliding_attention"')
    if len(layer_types) != config["num_hidden_layers"]:
        raise ModelError(f"layer_types has {len(layer_types)} of num_hidden_layers = {config['num_hidden_layers']}")
    if "sliding_attention" not in layer_types:
        return {}
    return {"window": _size(config, "sliding_window"), "windowed": tuple(x == "sliding_attention" for x in layer_types)}


def refuse(config: Config, **supported: Any) -> None:
    """Raise ModelError unless each field has its only supported value or is missing."""
    for field, value in supported.items():
        if (found := config.get(field, value)) != value:
            raise ModelError(f"{field} is {found!r}: only {value!r} is supported")


def _size(config: Config, field: str) -> int:
    value = config[field]
    if type(value) is not int or value < 1:
        raise ModelError(f"{field} is {value!r}: it must be a whole number of at least 1")
    return value
