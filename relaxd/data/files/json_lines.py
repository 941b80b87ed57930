"""Files with one JSON object per line, and what they share with other files of JSON objects."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from relaxd.data.files.plain import kind_of
from relaxd.json_text import parse_json

_CHUNK = 16 << 20
_SHORT = 32


class JsonObjects:
    """JSON objects in a file, of which only the places are in memory. Subclasses find them."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file can't be read."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._starts = self._ends = np.zeros(0, np.int64)
        """Offsets of each object's first byte, and of the byte after it, int64 [objects]."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return parse(self._read(self._starts[index], self._ends[index]))

    def scan(self) -> Iterator[dict[str, Any] | None]:
        for start, end in zip(self._starts, self._ends, strict=True):
            try:
                yield parse(self._read(start, end))
            except ValueError:
                yield None

    def content(self, part: range) -> Iterator[bytes]:
        start, end = int(self._starts[part.start]), int(self._ends[part.stop - 1])
        for offset in range(start, end, _CHUNK):
            yield os.pread(self._file, min(_CHUNK, end - offset), offset)

    def _read(self, start: np.int64, end: np.int64) -> bytes:
        return os.pread(self._file, int(end - start), int(start))


class JsonLines(JsonObjects):
    """The lines of a file that aren't blank: 24 bytes of memory for each."""

    def __init__(self, path: Path) -> None:
        """Find the lines. Raises OSError when the file can't be read."""
        super().__init__(path)
        starts = _line_starts(self._file)
        ends = np.append(starts[1:], os.fstat(self._file).st_size)
        # Blank lines are short: only such are read to find out.
        short = np.flatnonzero(ends - starts <= _SHORT)
        blank = [line for line in short.tolist() if not self._read(starts[line], ends[line]).strip()]
        lines = np.delete(np.arange(len(starts), dtype=np.int64), blank)
        self._starts, self._ends, self._lines = starts[lines], ends[lines], lines

    def place(self, index: int) -> str:
        return f"{self._path} line {self._lines[index] + 1}"


def parse(line: bytes) -> dict[str, Any]:
    """Parse a line, perhaps with a byte order mark. Raises ValueError: it isn't a JSON object."""
    try:
        record = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f'a JSON object such as {{"prompt": "..."}} is needed, not {kind_of(record)}')
    return record


def _line_starts(file: int) -> np.ndarray:
    """Return the offsets of lines, int64 [lines]."""
    found, offset = [np.zeros(1, np.int64)], 0
    while chunk := os.pread(file, _CHUNK, offset):
        found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (offset + 1))
        offset += len(chunk)
    starts = np.concatenate(found)
    return starts[starts < offset]
