"""The mapping between Hugging Face tensors and Megatron parameters: one table per architecture, for both directions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.trainer.model.architecture import Architecture


class Layout(Protocol):
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


class Columns:
    """Ranks have blocks of the single part's columns (Megatron's row-parallel linear layers)."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """Return this rank's columns."""
        return parts[0].chunk(size, dim=1)[rank]

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Return all columns."""
        return [shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim=1)]


class Rows:
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
        per_group = shape.heads // shape.kv_heads
        full = shards[0] if len(shards) == 1 else torch.cat(tuple(shards))
        heads = full.view(shape.kv_heads, per_group + 2, shape.head_size, full.shape[-1])
        return [part.reshape(-1, full.shape[-1]) for part in heads.split([per_group, 1, 1], dim=1)]


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


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    megatron: str
    """Name of the Megatron parameter; {layer} counts within the stage."""
    layout: type[Layout]
    """Its fusion and sharding."""
    parts: tuple[tuple[str, str], ...]
    """Hugging Face tensors: name ({layer} and {expert} count over the whole model) and shape, as names of sizes."""
    exported: bool = True
    """Whether the tensor is exported by this rule; False if another rule does."""


_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_EMBEDDING = ("model.embed_tokens.weight", "vocab hidden")

FIRST = (Rule("embedding.word_embeddings.weight", Rows, (_EMBEDDING,)),)
"""Rules of the first stage."""

LAST = (Rule("decoder.final_layernorm.weight", Replicated, (("model.norm.weight", "hidden"),)),)
"""Rules of the last stage."""

LAST_UNTIED = (Rule("output_layer.weight", Rows, (("lm_head.weight", "vocab hidden"),)),)
"""The output layer, on the last stage."""

LAST_TIED = (Rule("output_layer.weight", Rows, (_EMBEDDING,), exported=False),)
"""The last stage's copy of a tied embedding, unless it is also the first stage."""

LAYER = (
    Rule(f"{_LAYER}.input_layernorm.weight", Replicated, ((f"{_HF_LAYER}.input_layernorm.weight", "hidden"),)),
    Rule(
        f"{_LAYER}.self_attention.linear_qkv.weight",
        QueryKeyValue,
        (
            (f"{_HF_LAYER}.self_attn.q_proj.weight", "query hidden"),
            (f"{_HF_LAYER}.self_attn.k_proj.weight", "kv hidden"),
            (f"{_HF_LAYER}.self_attn.v_proj.weight", "kv hidden"),
        ),
    ),
    Rule(
        f"{_LAYER}.self_attention.linear_proj.weight",
        Columns,
        ((f"{_HF_LAYER}.self_attn.o_proj.weight", "hidden query"),),
    ),
    Rule(
        f"{_LAYER}.pre_mlp_layernorm.weight", Replicated, ((f"{_HF_LAYER}.post_attention_layernorm.weight", "hidden"),)
    ),
)
"""Rules of every layer of every architecture."""

QK_NORM = tuple(
    Rule(
        f"{_LAYER}.self_attention.{x}_layernorm.weight",
        Replicated,
        ((f"{_HF_LAYER}.self_attn.{x}_norm.weight", "head"),),
    )
    for x in "qk"
)
"""Per-head norms of Qwen3."""

QKV_BIAS = (
    Rule(
        f"{_LAYER}.self_attention.linear_qkv.bias",
        QueryKeyValueBias,
        (
            (f"{_HF_LAYER}.self_attn.q_proj.bias", "query"),
            (f"{_HF_LAYER}.self_attn.k_proj.bias", "kv"),
            (f"{_HF_LAYER}.self_attn.v_proj.bias", "kv"),
        ),
    ),
)
"""Biases of Qwen2."""

DENSE_MLP = (
    Rule(
        f"{_LAYER}.mlp.linear_fc1.weight",
        Rows,
        ((f"{_HF_LAYER}.mlp.gate_proj.weight", "ffn hidden"), (f"{_HF_LAYER}.mlp.up_proj.weight", "ffn hidden")),
    ),
    Rule(f"{_LAYER}.mlp.linear_fc2.weight", Columns, ((f"{_HF_LAYER}.mlp.down_proj.weight", "hidden ffn"),)),
)
"""A dense layer's MLP."""

ROUTER = (Rule(f"{_LAYER}.mlp.router.weight", Replicated, ((f"{_HF_LAYER}.mlp.gate.weight", "experts hidden"),)),)
"""The router."""

_EXPERTS, _HF_EXPERT = f"{_LAYER}.mlp.experts", f"{_HF_LAYER}.mlp.experts.{{expert}}"
EXPERT = (
    Rule(
        f"{_EXPERTS}.linear_fc1",
        Rows,
        (
            (f"{_HF_EXPERT}.gate_proj.weight", "expert_ffn hidden"),
            (f"{_HF_EXPERT}.up_proj.weight", "expert_ffn hidden"),
        ),
    ),
    Rule(f"{_EXPERTS}.linear_fc2", Columns, ((f"{_HF_EXPERT}.down_proj.weight", "hidden expert_ffn"),)),
)
"""One expert: its part of the parameters of all the rank's experts."""

_SHARED, _HF_SHARED = f"{_LAYER}.mlp.shared_expert", f"{_HF_LAYER}.mlp.shared_expert"
SHARED_EXPERT = (
    Rule(
        f"{_SHARED}.linear_fc1.weight",
        Rows,
        (
            (f"{_HF_SHARED}.gate_proj.weight", "shared_ffn hidden"),
            (f"{_HF_SHARED}.up_proj.weight", "shared_ffn hidden"),
        ),
    ),
    Rule(f"{_SHARED}.linear_fc2.weight", Columns, ((f"{_HF_SHARED}.down_proj.weight", "hidden shared_ffn"),)),
    Rule(f"{_SHARED}_gate.weight", Replicated, ((f"{_HF_SHARED}_gate.weight", "one hidden"),)),
)
"""The shared expert and its gate."""

LAYER_RULES = {
    "llama": (*LAYER, *DENSE_MLP),
    "qwen3": (*LAYER, *QK_NORM, *DENSE_MLP),
    "qwen2_moe": (*LAYER, *ROUTER),
    "qwen3_moe": (*LAYER, *QK_NORM, *ROUTER),
}
"""The rules of a layer by model_type, without experts."""


def layer_rules(shape: Architecture) -> Iterator[Rule]:
    """Yield the rules of a layer, without those of its routed experts."""
    yield from LAYER_RULES[shape.model_type]
    if shape.qkv_bias:
        yield from QKV_BIAS
    if shape.experts is not None and shape.experts.shared_ffn_size is not None:
        yield from SHARED_EXPERT


@dataclass(frozen=True)
class HFTensor:
    """One Hugging Face tensor."""

    name: str
    """Name."""
    shape: tuple[int, ...]
    """Shape."""


@dataclass(frozen=True)
class ParameterEntry:
    """One Megatron parameter of one pipeline stage, or an expert's part of it, and the Hugging Face tensors in it."""

    megatron: str
    """Name of the parameter on its rank."""
    layout: type[Layout]
    """Its fusion and sharding."""
    parts: tuple[tuple[HFTensor, ...], ...]
    """Its tensors: one tuple, or for an expert one tuple per expert-parallel rank."""
    index: int | None
    """Number of the expert on its rank, None for a whole parameter. On each expert-parallel rank the number is that of
    another expert."""
    exported: bool
    """Whether its tensors are exported by this entry."""

    @property
    def expert(self) -> bool:
        """Whether it belongs to an expert."""
        return self.index is not None

    def of(self, parameter: Tensor) -> Tensor:
        """Return this entry's part of the parameter, a view."""
        return parameter if self.index is None else parameter[self.index].flatten(0, -2)


def entries(shape: Architecture, pp_rank: int, pp_size: int, ep_size: int) -> Iterator[ParameterEntry]:
    """Yield the entries of a pipeline stage, in the order shared by loading, gathering and specs.

    Args:
        shape: the model's architecture.
        pp_rank: the stage.
        pp_size: number of stages; it divides the number of layers.
        ep_size: number of ranks that share the experts.
    """
    last = pp_rank == pp_size - 1
    if pp_rank == 0:
        yield from (_entry(rule, shape) for rule in FIRST)
    per_stage = shape.layers // pp_size
    for layer in range(per_stage):
        whole = pp_rank * per_stage + layer
        yield from (_entry(rule, shape, layer, whole) for rule in layer_rules(shape))
        per_rank = shape.experts.count // ep_size if shape.experts else 0
        for expert in range(per_rank):
            same_place = [rank * per_rank + expert for rank in range(ep_size)]
            yield from (_entry(rule, shape, layer, whole, expert, same_place) for rule in EXPERT)
    if last:
        yield from (_entry(rule, shape) for rule in LAST)
        if not shape.tied_embeddings:
            yield from (_entry(rule, shape) for rule in LAST_UNTIED)
        elif pp_size > 1:
            yield from (_entry(rule, shape) for rule in LAST_TIED)


def _entry(
    rule: Rule,
    shape: Architecture,
    layer: int = 0,
    whole_layer: int = 0,
    expert: int | None = None,
    experts: Sequence[int] = (0,),
) -> ParameterEntry:
    sizes = {
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "query": shape.heads * shape.head_size,
        "kv": shape.kv_heads * shape.head_size,
        "head": shape.head_size,
        "ffn": shape.ffn_size,
        "experts": shape.experts.count if shape.experts else 0,
        "expert_ffn": shape.experts.ffn_size if shape.experts else 0,
        "shared_ffn": (shape.experts.shared_ffn_size if shape.experts else None) or 0,
        "one": 1,
    }
    return ParameterEntry(
        megatron=rule.megatron.format(layer=layer),
        layout=rule.layout,
        parts=tuple(
            tuple(
                HFTensor(name.format(layer=whole_layer, expert=i), tuple(sizes[size] for size in names.split()))
                for name, names in rule.parts
            )
            for i in experts
        ),
        index=expert,
        exported=rule.exported,
    )
