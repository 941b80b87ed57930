"""The parameters of a pipeline stage and the Hugging Face tensors in them, for both loading and exporting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from relaxd.models.layouts import chunk_layers
from services.trainer.model.architecture import Architecture
from services.trainer.model.architectures import FAMILIES
from services.trainer.model.family import Family
from services.trainer.model.tensor_rules import (
    FIRST,
    LAST,
    LAST_TIED,
    LAST_UNTIED,
    ParameterLayout,
    Replicated,
    Rule,
)
from services.trainer.model.towers import TOWERS, tower_shapes


@dataclass(frozen=True)
class HFTensor:
    """One Hugging Face tensor."""

    name: str
    """Name."""
    shape: tuple[int, ...]
    """Shape."""
    index: int = 0
    """Index in the stack."""
    stack: int = 0
    """Number of parts, each of this shape, that the named tensor is stacked from; 0 for a whole tensor."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor of this name."""
        return (self.stack, *self.shape) if self.stack else self.shape

    @property
    def is_last(self) -> bool:
        """True if no part of its tensor follows, in the order of `entries`."""
        return self.index + 1 >= self.stack


@dataclass(frozen=True)
class ParameterEntry:
    """One Megatron parameter of one pipeline stage, or an expert's part of it, and the Hugging Face tensors in it."""

    megatron: str
    """Name of the parameter on its rank."""
    layout: type[ParameterLayout]
    """Fusion and sharding of the parameter."""
    parts: tuple[tuple[HFTensor, ...], ...]
    """Tensors of the parameter: one tuple, or for an expert one tuple per expert-parallel rank."""
    index: int | None
    """Number of the expert on its rank, None for a whole parameter. On each expert-parallel rank the number is that of
    another expert."""
    exported: bool
    """True if its tensors are exported by this entry."""

    @property
    def expert(self) -> bool:
        """True if the parameter belongs to an expert."""
        return self.index is not None

    def of(self, parameter: Tensor) -> Tensor:
        """Return this entry's part of the parameter, a view."""
        return parameter if self.index is None else parameter[self.index].flatten(0, -2)


def entries(
    shape: Architecture,
    pp_rank: int,
    pp_size: int,
    ep_size: int,
    pipeline_layers: Sequence[int] = (),
    pipeline_chunks: int = 1,
) -> Iterator[ParameterEntry]:
    """Yield the entries of a pipeline stage, in the order shared by loading, gathering and specs.

    Args:
        shape: the model's architecture.
        pp_rank: the stage.
        pp_size: number of stages.
        ep_size: number of ranks that share the experts.
        pipeline_layers: see `stage_layers`.
        pipeline_chunks: see `chunk_layers`. With several, the stage is an `InterleavedModel`.
    """
    chunks = chunk_layers(shape.layers, pp_size, pipeline_layers, pipeline_chunks)[pp_rank]
    for chunk, layers in enumerate(chunks):
        first, last = pp_rank == chunk == 0, (pp_rank, chunk) == (pp_size - 1, pipeline_chunks - 1)
        for entry in _chunk_entries(shape, layers, ep_size, first=first, last=last):
            yield entry if pipeline_chunks == 1 else replace(entry, megatron=f"chunks.{chunk}.{entry.megatron}")


def _chunk_entries(
    shape: Architecture, layers: Sequence[int], ep_size: int, *, first: bool, last: bool
) -> Iterator[ParameterEntry]:
    """Yield the entries of some layers, which may be the model's first or last ones."""
    family = FAMILIES[shape.model_type]
    if first:
        for tower in shape.towers:
            for name, size in tower_shapes(tower).items():
                tensor = HFTensor(f"{tower.prefix}{tower.name}.{name}", size)
                yield ParameterEntry(f"{TOWERS}.{tower.name}.{name}", Replicated, ((tensor,),), None, True)
        yield from (_entry(rule, shape) for rule in FIRST)
    for layer, whole in enumerate(layers):
        yield from (_entry(rule, shape, layer, whole) for rule in family.rules(shape, whole))
        per_rank = shape.experts.count // ep_size if shape.experts else 0
        for expert in range(per_rank):
            same_place = [rank * per_rank + expert for rank in range(ep_size)]
            yield from (_entry(rule, shape, layer, whole, expert, same_place) for rule in family.expert_rules)
    if last:
        yield from (_entry(rule, shape) for rule in LAST)
        if not shape.tied_embeddings:
            yield from (_entry(rule, shape) for rule in LAST_UNTIED)
        elif not first:
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
        **_delta_sizes(shape),
        "experts": shape.experts.count if shape.experts else 0,
        "expert_ffn": shape.experts.ffn_size if shape.experts else 0,
        "shared_ffn": (shape.experts.shared_ffn_size if shape.experts else None) or 0,
        "one": 1,
    }
    family = FAMILIES[shape.model_type]
    return ParameterEntry(
        megatron=rule.megatron.format(layer=layer),
        layout=rule.layout,
        parts=tuple(
            tuple(
                HFTensor(
                    _named(name, family).format(layer=whole_layer, expert=i),
                    tuple(sum(sizes[x] for x in size.split("+")) for size in names.split()),
                    *((i, sizes["experts"]) if rule.stacked else ()),
                )
                for name, names in rule.parts
            )
            for i in experts
        ),
        index=expert,
        exported=rule.exported,
    )


def _delta_sizes(shape: Architecture) -> dict[str, int]:
    sizes = shape.delta_net
    if sizes is None:
        return {}
    return {
        "delta_keys": sizes.keys,
        "delta_values": sizes.values,
        "delta_value": sizes.value_size,
        "delta_heads": sizes.value_heads,
        "convolution": sizes.convolution,
    }


def _named(name: str, family: Family) -> str:
    """Return a rule's name of a tensor with the family's prefix."""
    rest = name.removeprefix("model.")
    return f"{family.outer}{name}" if rest == name else family.prefix + rest
