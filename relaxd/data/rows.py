"""Sequences of rows, their parts and concatenations, and conversion of row values to JSON."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import numpy as np

Item = TypeVar("Item")
_CHUNK = 16 << 20


class Rows(Protocol):
    """Interface of the rows of a file. Reading a row may raise ValueError, which says what is wrong with the row."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def scan(self) -> Iterator[dict[str, Any] | None]:
        """Yield all rows in order, and None for a wrong row. Faster than reading each row by its index."""

    def content(self, part: range) -> Iterator[bytes]:
        """Yield the stored bytes of a range of rows, whose step must be 1, for a digest that shows changed data.

        A table yields the whole file, whatever the range. A user's own source yields JSON, of at most
        `run_sources.DIGESTED` rows.
        """

    def place(self, index: int) -> str:
        """Return a row's location in readable form, such as "train.jsonl line 3"."""


class Part:
    """Selected rows of a file, given by a slice."""

    def __init__(self, rows: Rows, part: slice) -> None:
        self._rows = rows
        self._range = range(len(rows))[part]

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[self._range[index]]

    def scan(self) -> Iterator[dict[str, Any] | None]:
        return islice(self._rows.scan(), self._range.start, self._range.stop)

    def content(self, part: range) -> Iterator[bytes]:
        return self._rows.content(self._range[part.start : part.stop])

    def place(self, index: int) -> str:
        return self._rows.place(self._range[index])


class OnDemand(Sequence[Item], ABC):
    """Sequence whose items are created when they are accessed."""

    @abstractmethod
    def _item(self, index: int) -> Item:
        """Create the item at an index of the sequence."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._item(place) for place in range(len(self))[index]]
        return self._item(index)


class Joined(OnDemand[Item]):
    """Concatenation of several sequences."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self.parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _item(self, index: int) -> Item:
        part, inside = _find(self._ends, range(len(self))[index])
        return self.parts[part][inside]


class JoinedRows:
    """Concatenation of the rows of several files."""

    def __init__(self, files: Sequence[Rows]) -> None:
        self._files = files
        self._ends = list(accumulate(map(len, files)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, inside = _find(self._ends, index)
        return self._files[file][inside]

    def scan(self) -> Iterator[dict[str, Any] | None]:
        return chain.from_iterable(file.scan() for file in self._files)

    def content(self, part: range) -> Iterator[bytes]:
        for file, end in zip(self._files, self._ends, strict=True):
            start = end - len(file)
            if inside := range(max(part.start - start, 0), min(part.stop - start, len(file))):
                yield from file.content(inside)

    def place(self, index: int) -> str:
        file, inside = _find(self._ends, index)
        return self._files[file].place(inside)


def file_content(path: Path) -> Iterator[bytes]:
    """Yield a whole file as chunks of bytes. Raises OSError if it can't be read."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _find(ends: Sequence[int], index: int) -> tuple[int, int]:
    """Return the number of the part of a concatenation that contains an index, and the index within this part."""
    part = bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


_PLAIN = frozenset((str, int, bool, type(None)))


def plain(value: Any) -> Any:
    """Convert a value to JSON's types: arrays to lists, numpy's numbers to Python's, times and decimals to text.

    NaN, which marks missing numbers in tables, becomes None. Values without a JSON form stay unchanged.
    """
    kind = type(value)  # exact types first: every row of a file passes here
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {
            name if type(name) is str else str(name): one if type(one) in _PLAIN else plain(one)
            for name, one in value.items()
        }
    if kind is list:
        return [one if type(one) in _PLAIN else plain(one) for one in value]
    return _converted(value)


def _converted(value: Any) -> Any:
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return plain(dict(value))
    if isinstance(value, list | tuple):
        return plain(list(value))
    if isinstance(value, date | time | timedelta | Decimal | np.datetime64 | np.timedelta64):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return value


def kind_of(value: Any) -> str:
    """Return the kind of a value in words for error messages, such as "a list"."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    other = "a number" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"
    return kinds.get(type(value), other) + (" without entries" if type(value) is list and not value else "")


def stranger(name: str, value: Any) -> tuple[str, Any] | None:
    """Find the first value that JSON can't represent, within `value`. Returns its dotted name and the value; None if
    there is none."""
    if type(value) in _PLAIN or isinstance(value, str | int | float):
        return None
    if type(value) is dict:
        inside = ((f"{name}.{key}", one) for key, one in value.items() if type(one) not in _PLAIN)
    elif type(value) is list:
        inside = ((name, one) for one in value if type(one) not in _PLAIN)
    else:
        return name, value
    for key, one in inside:
        if found := stranger(key, one):
            return found
    return None
