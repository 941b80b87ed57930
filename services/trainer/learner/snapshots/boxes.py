"""Places of a rank's elements in the whole model's tensors, under any parallel layout.

A whole tensor is divided into boxes, one for each tensor-parallel, pipeline and expert rank. Data-parallel ranks divide
a box further, into ranges of its elements in row-major order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""First indices and sizes."""


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor: what one rank's layers hold of it."""

    tensor: str
    """Name of the whole tensor."""
    whole: tuple[int, ...]
    """Its shape."""
    offset: tuple[int, ...]
    """First index of the box in each dimension."""
    shape: tuple[int, ...]
    """Its shape, with as many dimensions."""
    padded: bool = False
    """True if other layouts pad the first dimension differently, as for the vocabulary."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance of neighbours in each dimension, in elements."""
        return tuple(prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape)))

    def place(self, index: tuple[int, ...]) -> int:
        """Return the place of an element, given by its index in the whole tensor, in the box's row-major order."""
        local = (at - first for at, first in zip(index, self.offset, strict=True))
        return sum(at * stride for at, stride in zip(local, self.strides, strict=True))

    def rectangles(self, begin: int, end: int) -> list[Rectangle]:
        """Return elements `begin` to `end - 1` in row-major order as rectangles of the whole tensor."""
        return [
            (tuple(at + first for at, first in zip(local, self.offset, strict=True)), sizes)
            for local, sizes in _rectangles(self.shape, begin, end)
        ]

    def same_place(self, other: "Box") -> bool:
        """Return whether another box has the same elements of the same tensor."""
        return (self.tensor, self.offset, self.shape) == (other.tensor, other.offset, other.shape)

    def fits(self, other: "Box") -> bool:
        """Return whether another box may be of the same whole tensor."""
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
    """Return the rectangle of what two have in common, None if there is nothing."""
    starts = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = (min(a + sizes, b + others) for a, sizes, b, others in zip(one[0], one[1], other[0], other[1], strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def without(one: Rectangle, other: Rectangle) -> list[Rectangle]:
    """Return rectangles of what the first one has and the other hasn't."""
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
    """Return a rectangle as Python would index it, such as [0:4, 8:16]."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(*rectangle, strict=True))}]"
