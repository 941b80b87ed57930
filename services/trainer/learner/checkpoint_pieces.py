"""Pieces of a rank's state in a checkpoint. A piece names its whole tensor and its elements in it, under any layout.

Megatron's distributed optimizer divides main weights and moments among the data-parallel (and context-parallel) ranks.
A rank saves its part. The weights of a trained model aren't saved separately, because they are the rounded
main weights. Tensors that aren't trained are equal on all data-parallel ranks, and each rank saves its share.

A whole tensor is divided into boxes, one for each tensor-parallel, pipeline and expert rank. Data-parallel ranks divide
a box further, into ranges of its elements in row-major order.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from services.trainer.learner.small_moments import MOMENTS, Float8Values, float8_values

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Rectangular part of a tensor: the first index and the size in each dimension."""


@dataclass(frozen=True)
class Box:
    """Rectangular part of a whole tensor, held by one rank's layers."""

    tensor: str
    """Name of the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """First index of the box in each dimension."""
    shape: tuple[int, ...]
    """Shape of the box, with the same number of dimensions."""
    padded: bool = False
    """True if parallel layouts pad the first dimension to different sizes, as for the vocabulary."""

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the box in row-major order, in elements."""
        return tuple(prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape)))

    def place(self, index: tuple[int, ...]) -> int:
        """Return the offset in the box, in row-major order, of the element at `index` of the whole tensor."""
        local = (at - first for at, first in zip(index, self.offset, strict=True))
        return sum(at * stride for at, stride in zip(local, self.strides, strict=True))

    def rectangles(self, begin: int, end: int) -> list[Rectangle]:
        """Return rectangles of the whole tensor with the box's elements `begin` to `end - 1` in row-major order."""
        return [
            (tuple(at + first for at, first in zip(local, self.offset, strict=True)), sizes)
            for local, sizes in _rectangles(self.shape, begin, end)
        ]

    def same_place(self, other: "Box") -> bool:
        """Return True if box `other` covers the same elements of the same tensor."""
        return (self.tensor, self.offset, self.shape) == (other.tensor, other.offset, other.shape)

    def fits(self, other: "Box") -> bool:
        """Return True if the whole tensor of box `other` has the same shape, apart from padding."""
        if not self.padded:
            return self.whole == other.whole
        return len(self.whole) == len(other.whole) and self.whole[1:] == other.whole[1:]


def _rectangles(shape: tuple[int, ...], begin: int, end: int) -> list[Rectangle]:
    if begin >= end:
        return []
    if len(shape) < 2:
        return [((begin,), (end - begin,))] if shape else [((), ())]
    rest = shape[1:]
    row = prod(rest)
    first, last = begin // row, end // row
    if first == last:  # within one row
        return _in_row(first, rest, begin - first * row, end - first * row)
    found = []
    if begin % row:
        found += _in_row(first, rest, begin - first * row, row)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    return found + _in_row(last, rest, 0, end - last * row)


def _in_row(row: int, shape: tuple[int, ...], begin: int, end: int) -> list[Rectangle]:
    return [((row, *at), (1, *sizes)) for at, sizes in _rectangles(shape, begin, end)]


def intersection(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """Return the intersection of two rectangles, None if it is empty."""
    starts = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = (min(a + sizes, b + others) for a, sizes, b, others in zip(one[0], one[1], other[0], other[1], strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def without(one: Rectangle, other: Rectangle) -> list[Rectangle]:
    """Return rectangles with the elements of `one` that are not in `other`."""
    both = intersection(one, other)
    if both is None:
        return [one]
    (starts, sizes), found = one, []
    for at, (first, size) in enumerate(zip(*both, strict=True)):
        end = starts[at] + sizes[at]
        for begin, stop in ((starts[at], first), (first + size, end)):
            if begin < stop:
                found.append(((*starts[:at], begin, *starts[at + 1 :]), (*sizes[:at], stop - begin, *sizes[at + 1 :])))
        starts, sizes = (*starts[:at], first, *starts[at + 1 :]), (*sizes[:at], size, *sizes[at + 1 :])
    return found


def elements(rectangles: Iterable[Rectangle]) -> int:
    """Return the number of elements of disjoint rectangles."""
    return sum(prod(sizes) for _, sizes in rectangles)


def shown(rectangle: Rectangle) -> str:
    """Return a rectangle in Python's notation, such as [0:4, 8:16]."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(*rectangle, strict=True))}]"


WEIGHTS = "weights"
"""Name of the state that is the weights: float32 main weights of a trained parameter, else the model's weights."""
STATE = {WEIGHTS: "param"} | {name: name for name in MOMENTS}
"""Names of a trained parameter's states, mapped to Megatron's names."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a box, in a rank's memory or in a file."""

    state: str
    """Name of the state that the elements belong to, from STATE."""
    box: Box
    """Box that contains the elements."""
    begin: int
    """Offset of the first element in the box's row-major order."""
    end: int
    """Offset after the last element, in the box's row-major order."""


@dataclass(frozen=True)
class LocalBox:
    """Box that a rank's parameter contains. Some parameters contain two, such as a gate and its projection."""

    box: Box
    """Place of the elements in the whole model's tensor."""
    start: int
    """Offset of the box's first element in the parameter, in row-major order."""
    saved: bool
    """True if this rank saves its copy of the parameter; the same on all data-parallel ranks."""


Boxes = Mapping[Tensor, list[LocalBox]]
"""Boxes that each parameter of a model contains."""
Elements = Tensor | Float8Values
"""Elements of a state in a rank's memory: a flat tensor, or float8 numbers with scales."""
Pieces = Iterator[tuple[Piece, Elements, bool]]
"""Iterator over pieces, each with its elements, and True if this rank saves the piece."""


def boxes_of(model: Any, name: str) -> Boxes:
    """Return the boxes of a Megatron model's parameters.

    Args:
        model: this rank's part of the model.
        name: the model's name, which begins the names of its tensors.
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
    # `replica_id` is (copy in another pipeline stage, tensor-parallel rank, data-parallel rank).
    saved = not any(part.replica_id[:2])
    return LocalBox(box, part.data.storage_offset() - parameter.storage_offset(), saved)


def trained_pieces(boxes: Boxes, optimizers: list[Any]) -> Pieces:
    """Yield the pieces of main weights and moments that this rank's distributed optimizers hold."""
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
    """Yield the pieces of weights that aren't trained.

    Args:
        boxes: boxes of all parameters of the model.
        share: yield only this rank's share of the elements, because all data-parallel ranks have the same weights.
    """
    for parameter in boxes:
        if not parameter.requires_grad:
            yield from weight_pieces(boxes, parameter, share=share)


def weight_pieces(boxes: Boxes, parameter: Tensor, *, share: bool = False) -> Pieces:
    """Yield the pieces of a parameter's weights, as the model has them. `share`: see `untrained_pieces`."""
    begin, end, count = 0, parameter.numel(), parameter.numel()
    if share:
        rank, size = _data_parallel(parameter)
        begin, end = count * rank // size, count * (rank + 1) // size
    flat = parameter.detach().view(-1)
    yield from _pieces(boxes[parameter], WEIGHTS, flat[begin:end], begin, end)


def _pieces(boxes: list[LocalBox], state: str, flat: Elements, begin: int, end: int) -> Pieces:
    """Yield the pieces of a parameter's elements `begin` to `end - 1`; `flat` contains these elements."""
    for local in boxes:
        first, last = max(begin, local.start), min(end, local.start + local.box.numel)
        if first < last:
            piece = Piece(state, local.box, first - local.start, last - local.start)
            yield piece, flat[first - begin : last - begin], local.saved


def _data_parallel(parameter: Tensor) -> tuple[int, int]:
    """Return this rank's index among the ranks with the same part of a parameter, and the number of these ranks."""
    if not getattr(parameter, "allreduce", True):  # an expert's
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
