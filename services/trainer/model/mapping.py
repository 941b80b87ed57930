"""Which Hugging Face tensor is which Megatron parameter: one table per architecture, used in both directions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.trainer.model.architecture import Architecture


class Layout(Protocol):
    """How Hugging Face tensors (`parts`) become one Megatron parameter, cut among `size` ranks, and back."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """This rank's parameter."""

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """The parts, of these shapes, from all ranks' parameters in rank order."""


class Replicated:
    """Every rank has the whole of the one part."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """The part."""
        return parts[0]

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Any rank's."""
        return [shards[0]]


class Columns:
    """Ranks have blocks of the one part's columns (Megatron's row-parallel linear layers)."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """This rank's columns."""
        return parts[0].chunk(size, dim=1)[rank]

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """All columns."""
        return [shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim=1)]


class Rows:
    """Ranks have blocks of each part's rows, part after part (column-parallel linear layers, gate and up, embeddings).

    Rows that can't be divided evenly (a vocabulary) are padded with zeros.
    """

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """This rank's rows of each part."""
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
        """All rows of each part, without padding."""
        sizes = [-(-part[0] // len(shards)) for part in shapes]
        split = [shard.split(sizes) for shard in shards]
        parts = [split[0][i] if len(shards) == 1 else torch.cat([s[i] for s in split]) for i in range(len(shapes))]
        return [part[: full[0]] for part, full in zip(parts, shapes, strict=True)]


class QueryKeyValue:
    """Ranks have whole key-value heads, each preceded by its query heads: q q q k v, q q q k v ..."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """This rank's heads."""
        heads = [part.view(shape.kv_heads, -1, shape.head_size, part.shape[-1]) for part in parts]
        mine = torch.cat([part.chunk(size)[rank] for part in heads], dim=1)
        return mine.reshape(-1, mine.shape[-1])

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Queries, keys and values of all heads."""
        per_group = shape.heads // shape.kv_heads
        full = shards[0] if len(shards) == 1 else torch.cat(tuple(shards))
        heads = full.view(shape.kv_heads, per_group + 2, shape.head_size, full.shape[-1])
        return [part.reshape(-1, full.shape[-1]) for part in heads.split([per_group, 1, 1], dim=1)]


class QueryKeyValueBias:
    """The biases of `QueryKeyValue`, in the same order."""

    @staticmethod
    def shard(parts: Sequence[Tensor], rank: int, size: int, shape: Architecture) -> Tensor:
        """This rank's heads."""
        return QueryKeyValue.shard([part.unsqueeze(-1) for part in parts], rank, size, shape).squeeze(-1)

    @staticmethod
    def merge(shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], shape: Architecture) -> list[Tensor]:
        """Queries, keys and values of all heads."""
        merged = QueryKeyValue.merge([shard.unsqueeze(-1) for shard in shards], shapes, shape)
        return [part.squeeze(-1) for part in merged]


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    megatron: str
    """Name of Megatron's parameter; {layer} counts within the stage."""
    layout: type[Layout]
    """How it is fused and cut."""
    parts: tuple[tuple[str, str], ...]
    """Hugging Face's tensors: name ({layer} and {expert} count over the whole model) and shape, in sizes' names."""
    exported: bool = True
    """False where the same tensor is already exported under another rule."""


_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_EMBEDDING = ("model.embed_tokens.weight", "vocab hidden")

FIRST = (Rule("embedding.word_embeddings.weight", Rows, (_EMBEDDING,)),)
"""Only on the first stage."""

LAST = (Rule("decoder.final_layernorm.weight", Replicated, (("model.norm.weight", "hidden"),)),)
"""Only on the last stage."""

LAST_UNTIED = (Rule("output_layer.weight", Rows, (("lm_head.weight", "vocab hidden"),)),)
"""The output layer, on the last stage."""

LAST_TIED = (Rule("output_layer.weight", Rows, (_EMBEDDING,), exported=False),)
"""The last stage's copy of the embedding, where that isn't the first stage."""

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
"""In every layer of every architecture."""

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
"""What chooses the experts."""

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
"""One expert: its part of the parameters that the rank's experts share."""

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
"""The expert that all tokens go to, and its gate."""

LAYER_RULES = {
    "llama": (*LAYER, *DENSE_MLP),
    "qwen3": (*LAYER, *QK_NORM, *DENSE_MLP),
    "qwen2_moe": (*LAYER, *ROUTER),
    "qwen3_moe": (*LAYER, *QK_NORM, *ROUTER),
}
"""The rules of a layer, by model_type; experts follow where the model has them."""


def layer_rules(shape: Architecture) -> Iterator[Rule]:
    """The rules of a layer, without those of its experts."""
    yield from LAYER_RULES[shape.model_type]
    if shape.qkv_bias:
        yield from QKV_BIAS
    if shape.experts is not None and shape.experts.shared_ffn_size is not None:
        yield from SHARED_EXPERT


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor."""

    name: str
    """Its name."""
    shape: tuple[int, ...]
    """Its shape."""


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of one pipeline stage, or an expert's part of it, and the Hugging Face tensors in it."""

    megatron: str
    """Name of the parameter on its rank."""
    layout: type[Layout]
    """How it is fused and cut."""
    parts: tuple[tuple[Part, ...], ...]
    """Its tensors; for an expert those of each expert-parallel rank, else one tuple."""
    index: int | None
    """Which part of the parameter it is: the expert's number on its rank; None: the whole. Ranks have different experts
    under the same number, and not parts of one tensor."""
    exported: bool
    """Whether its tensors are exported from here."""

    @property
    def expert(self) -> bool:
        """Whether it is an expert's."""
        return self.index is not None

    def of(self, parameter: Tensor) -> Tensor:
        """Its part of the parameter, a view."""
        return parameter if self.index is None else parameter[self.index].flatten(0, -2)


def entries(shape: Architecture, stage: int, stages: int, expert_ranks: int) -> Iterator[Entry]:
    """Every parameter of a pipeline stage, in the one fixed order that loading, gathering and specs share.

    Args:
        shape: the model.
        stage: which stage.
        stages: how many there are; they divide the layers.
        expert_ranks: ranks that share the experts.
    """
    last = stage == stages - 1
    if stage == 0:
        yield from (_entry(rule, shape) for rule in FIRST)
    per_stage = shape.layers // stages
    for layer in range(per_stage):
        whole = stage * per_stage + layer
        yield from (_entry(rule, shape, layer, whole) for rule in layer_rules(shape))
        per_rank = shape.experts.count // expert_ranks if shape.experts else 0
        for expert in range(per_rank):
            same_place = [rank * per_rank + expert for rank in range(expert_ranks)]
            yield from (_entry(rule, shape, layer, whole, expert, same_place) for rule in EXPERT)
    if last:
        yield from (_entry(rule, shape) for rule in LAST)
        if not shape.tied_embeddings:
            yield from (_entry(rule, shape) for rule in LAST_UNTIED)
        elif stages > 1:
            yield from (_entry(rule, shape) for rule in LAST_TIED)


def _entry(
    rule: Rule,
    shape: Architecture,
    layer: int = 0,
    whole_layer: int = 0,
    expert: int | None = None,
    experts: Sequence[int] = (0,),
) -> Entry:
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
    return Entry(
        megatron=rule.megatron.format(layer=layer),
        layout=rule.layout,
        parts=tuple(
            tuple(
                Part(name.format(layer=whole_layer, expert=i), tuple(sizes[size] for size in names.split()))
                for name, names in rule.parts
            )
            for i in experts
        ),
        index=expert,
        exported=rule.exported,
    )
