"""The parameters of a pipeline stage and the Hugging Face tensors in them, for loading and exporting; and which of them
are trained (`trainer.freeze`, `trainer.train_only`).
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relaxd.config import TrainerConfig
from relaxd.config.trainer import PARTS
from relaxd.models.layouts import Layout, chunk_layers
from services.trainer.megatron.world import World
from services.trainer.model.architecture import Architecture, ModelError
from services.trainer.model.architectures import FAMILIES
from services.trainer.model.family import (
    FIRST,
    LAST,
    LAST_TIED,
    LAST_UNTIED,
    Family,
    ParameterLayout,
    Replicated,
    Rule,
)
from services.trainer.model.towers import TOWERS, tower_shapes


@dataclass(frozen=True)
class HFTensor:
    """Name and shape of a Hugging Face tensor, or of one slice of a stacked tensor."""

    name: str
    """Name of the whole tensor in the Hugging Face folder."""
    shape: tuple[int, ...]
    """Shape of the tensor, or of one slice of a stacked tensor."""
    index: int = 0
    """Index of the slice in a stacked tensor."""
    stack: int = 0
    """Number of slices in the stacked tensor; 0 if the tensor isn't stacked."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor. The first dimension of a stacked tensor counts its slices."""
        return (self.stack, *self.shape) if self.stack else self.shape

    @property
    def is_last(self) -> bool:
        """True unless further slices of the same stacked tensor follow, in the order of `entries`."""
        return self.index + 1 >= self.stack


@dataclass(frozen=True)
class ParameterEntry:
    """A Megatron parameter of a pipeline stage, or one expert's slice of it, and the Hugging Face tensors in it."""

    megatron: str
    """Megatron's name of the parameter on its rank."""
    layout: type[ParameterLayout]
    """Layout that fuses and shards the parameter."""
    parts: tuple[tuple[HFTensor, ...], ...]
    """Hugging Face tensors in the parameter: one tuple, or for an expert one tuple per expert-parallel rank."""
    index: int | None
    """Index of the expert on its rank; None: the entry is the whole parameter. The same index means another expert on
    each expert-parallel rank."""
    exported: bool
    """True if exports take the tensors from this entry; False if they take them from another."""

    @property
    def expert(self) -> bool:
        """True if the parameter belongs to an expert."""
        return self.index is not None

    def of(self, parameter: Tensor) -> Tensor:
        """Return a view of the parameter, or of the expert's slice if this entry is an expert."""
        return parameter if self.index is None else parameter[self.index].flatten(0, -2)


ALONE = Layout(1)
"""Layout of a model that one rank holds whole."""


def entries(shape: Architecture, stage: int = 0, layout: Layout = ALONE) -> Iterator[ParameterEntry]:
    """Yield the parameter entries of a pipeline stage, in the order in which weights are loaded and gathered.

    Args:
        shape: the model's architecture.
        stage: the stage.
        layout: division of the model among ranks. With several chunks the stage is an `InterleavedModel`.
    """
    chunks = chunk_layers(shape.layers, layout.pipeline, layout.pipeline_layers, layout.pipeline_chunks)[stage]
    for chunk, layers in enumerate(chunks):
        first, last = stage == chunk == 0, (stage, chunk) == (layout.pipeline - 1, layout.pipeline_chunks - 1)
        for entry in _chunk_entries(shape, layers, layout.expert, first=first, last=last):
            yield entry if len(chunks) == 1 else replace(entry, megatron=f"chunks.{chunk}.{entry.megatron}")


def _chunk_entries(
    shape: Architecture, layers: Sequence[int], ep_size: int, *, first: bool, last: bool
) -> Iterator[ParameterEntry]:
    """Yield the parameter entries of a chunk. `first`, `last`: True for the model's first or last chunk."""
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
    """Return a rule's tensor name with the family's prefix."""
    rest = name.removeprefix("model.")
    return f"{family.outer}{name}" if rest == name else family.prefix + rest


def freeze(model: torch.nn.Module, shape: Architecture, world: World, config: TrainerConfig) -> None:
    """Freeze the parameters that the settings exclude from training. Call it before `DataParallel`.

    Each rank checks the whole model, so that all ranks raise the same error.

    Raises:
        ModelError: a pattern matches no name, a parameter has both trained and frozen tensors, or a pipeline stage has
            nothing to train.
    """
    setting = "train_only" if config.train_only else "freeze"
    patterns = [pattern for pattern in config.train_only or config.freeze if pattern not in PARTS]
    names: list[str] = []
    for stage in range(world.pp_size):
        tensors: defaultdict[str, list[str]] = defaultdict(list)
        for entry in entries(shape, stage, world.layout):
            tensors[entry.megatron] += [part.name for parts in entry.parts for part in parts]
        trained = {}
        for parameter, own in tensors.items():
            names += own
            by_fate = {config.trains(name): name for name in own}
            if len(by_fate) > 1:
                raise ModelError(
                    f"trainer.{setting} trains {by_fate[True]} but not {by_fate[False]}, which are one parameter in "
                    "the trainer: name both or none"
                )
            trained[parameter] = True in by_fate
        if not any(trained.values()):
            raise ModelError(
                f"trainer.{setting} leaves nothing to train in pipeline stage {stage}: choose fewer tensors to freeze, "
                "or fewer stages"
            )
        if stage == world.pp_rank:
            for name, weight in model.named_parameters():
                weight.requires_grad_(trained[name])
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ModelError(f"trainer.{setting} has {pattern!r}, which is found in no name: they are like {names[-1]}")
