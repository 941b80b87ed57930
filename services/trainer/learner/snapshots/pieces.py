"""The pieces of a rank's state that a checkpoint has: which elements of which whole tensor each one is.

Megatron's distributed optimizer divides main weights and moments among the data-parallel (and context-parallel) ranks.
A rank saves what it holds of them. The weights of a trained model aren't saved besides, because they are the main
weights, rounded. What isn't trained is the same on all data-parallel ranks, and each one saves its share.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from services.trainer.learner.bfloat16_moments import MOMENTS
from services.trainer.learner.float8_moments import Float8Values, float8_values
from services.trainer.learner.snapshots.boxes import Box

WEIGHTS = "weights"
"""The state of a parameter beside its moments: the float32 main weights; those of the model if it isn't trained."""
STATE = {WEIGHTS: "param"} | {name: name for name in MOMENTS}
"""The state of a trained parameter, and Megatron's name for it."""


@dataclass(frozen=True)
class Piece:
    """Elements of a whole tensor, in a rank's memory or in a file."""

    state: str
    """One of STATE."""
    box: Box
    """The box that they are in."""
    begin: int
    """The first one's place in the box's row-major order."""
    end: int
    """The place after the last one's."""


@dataclass(frozen=True)
class LocalBox:
    """A box of a rank's parameter. Some parameters are of two boxes, such as a gate and its projection."""

    box: Box
    """Its place in the whole model."""
    start: int
    """Place of its first element in the parameter's row-major order."""
    saved: bool
    """True if this rank saves its copy of the parameter. Data-parallel ranks all do."""


Boxes = Mapping[Tensor, list[LocalBox]]
"""The boxes of each parameter."""
Elements = Tensor | Float8Values
"""Elements of a rank's state itself: a flat tensor, or numbers with scales."""
Pieces = Iterator[tuple[Piece, Elements, bool]]
"""Pieces, their elements, and whether this rank saves them."""


def boxes_of(model: Any, name: str) -> Boxes:
    """Return where a Megatron model's parameters are in the whole model.

    Args:
        model: this rank's part.
        name: of the model; it distinguishes its tensors from those of others.
    """
    found: dict[Tensor, list[LocalBox]] = {}
    for entry in nested_values(model.sharded_state_dict()):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            parts = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
            found[entry.data] = [_local_box(part, entry.data, name) for part in parts]
    parameters = set(model.parameters())
    if found.keys() != parameters:
        raise RuntimeError(f"a checkpoint would have {len(found)} tensors of {len(parameters)} parameters of {name}")
    return found


def _local_box(part: ShardedTensor, parameter: Tensor, name: str) -> LocalBox:
    assert part.data is not None
    assert part.data.is_contiguous()
    box = Box(
        f"{name}.{part.key}",
        tuple(part.global_shape),
        tuple(part.global_offset),
        (1,) * part.prepend_axis_num + tuple(part.local_shape),
        part.allow_shape_mismatch,
    )
    # Of (copy in another pipeline stage, tensor-parallel rank, data-parallel rank).
    saved = not any(part.replica_id[:2])
    return LocalBox(box, part.data.storage_offset() - parameter.storage_offset(), saved)


def trained_pieces(boxes: Boxes, optimizers: list[Any]) -> Pieces:
    """Return this rank's pieces of the main weights and moments of Megatron's distributed optimizers."""
    for one in optimizers:
        for parameter in one.model_param_group_index_map:
            places = one._get_model_param_range_map(parameter)["param"]
            tensors = one._get_main_param_and_optimizer_states(parameter)
            for state, name in STATE.items():
                elements: Elements = tensors[name].detach().view(-1)
                if elements.dtype is torch.float8_e4m3fn:
                    elements = float8_values(tensors, places.start)
                yield from _pieces(boxes[parameter], state, elements, places.start, places.end)


def untrained_pieces(boxes: Boxes, *, share: bool) -> Pieces:
    """Return the pieces of the parameters that aren't trained.

    Args:
        boxes: of the model.
        share: only this rank's share of them, of the data-parallel ranks that have the same.
    """
    for parameter in boxes:
        if not parameter.requires_grad:
            yield from weight_pieces(boxes, parameter, share=share)


def weight_pieces(boxes: Boxes, parameter: Tensor, *, share: bool = False) -> Pieces:
    """Return the pieces of a parameter's weights in the model; see `untrained_pieces`."""
    begin, end, count = 0, parameter.numel(), parameter.numel()
    if share:
        rank, size = _data_parallel(parameter)
        begin, end = count * rank // size, count * (rank + 1) // size
    flat = parameter.detach().view(-1)
    yield from _pieces(boxes[parameter], WEIGHTS, flat[begin:end], begin, end)


def _pieces(boxes: list[LocalBox], state: str, flat: Elements, begin: int, end: int) -> Pieces:
    """Return the pieces of elements `begin` to `end - 1` of a parameter's."""
    for local in boxes:
        first, last = max(begin, local.start), min(end, local.start + local.box.numel)
        if first < last:
            piece = Piece(state, local.box, first - local.start, last - local.start)
            yield piece, flat[first - begin : last - begin], local.saved


def _data_parallel(parameter: Tensor) -> tuple[int, int]:
    """Return this rank's place among those that have the same part of a parameter, and their number."""
    if not getattr(parameter, "allreduce", True):  # an expert's
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
