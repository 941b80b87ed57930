"""Files of JSON objects, read one object at a time: one per line, or in one array."""

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from relaxd.data.files.rows import kind_of
from relaxd.json_text import parse_json
from relaxd.models import DataError

_CHUNK = 16 << 20
_SHORT = 32


class JsonObjects:
    """JSON objects in a file. Only their offsets are in memory. Subclasses find them."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file can't be read."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._starts = self._ends = np.zeros(0, np.int64)
        """Offsets of each object's first byte and of the byte after it, int64 [objects]."""

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
    """Non-blank lines of a file: 24 bytes of memory each."""

    def __init__(self, path: Path) -> None:
        """Find the lines. Raises OSError when the file can't be read."""
        super().__init__(path)
        starts = _line_starts(self._file)
        ends = np.append(starts[1:], os.fstat(self._file).st_size)
        # Blank lines are short, so only short lines are read to find them.
        short = np.flatnonzero(ends - starts <= _SHORT)
        blank = [line for line in short.tolist() if not self._read(starts[line], ends[line]).strip()]
        lines = np.delete(np.arange(len(starts), dtype=np.int64), blank)
        self._starts, self._ends, self._lines = starts[lines], ends[lines], lines

    def place(self, index: int) -> str:
        return f"{self._path} line {self._lines[index] + 1}"


def parse(line: bytes) -> dict[str, Any]:
    """Parse a line, with or without a byte order mark. Raises ValueError if it isn't a JSON object."""
    try:
        record = parse_json(line.rstrip(b"\r\n").decode("utf-8-sig"))
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


_MOST = 256 << 20
"""Maximum bytes of an object: a longer one counts as broken."""
_LONGEST_MARK = 16
"""Upper bound, in bytes, of a token that the end of a chunk may cut in two, such as "false" or an escaped letter."""
_SPACE = b" \t\r\n"


def is_array(path: Path) -> bool:
    """Return whether a file begins like a JSON array. Raises OSError if it can't be read."""
    with path.open("rb") as file:
        return file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)[:1] == b"["


class JsonArray(JsonObjects):
    """Objects of an array: 16 bytes of memory each. Each is parsed once to find its end."""

    def __init__(self, path: Path, field: str) -> None:
        """Find the objects.

        Raises OSError when the file can't be read, and DataError, naming the setting `field`: it isn't an array of
        objects.
        """
        super().__init__(path)
        self._field = field
        starts, ends = array("q"), array("q")
        reader = _Reader(self._file)
        for mark in (b"\xef", b"\xbb", b"\xbf"):  # a byte-order mark
            if reader.peek() == mark:
                reader.skip(1)
        self._expect(reader, b"[", "an array")
        if reader.peek() != b"]":
            while True:
                start, end = self._object(reader, len(starts) + 1)
                starts.append(start)
                ends.append(end)
                if reader.peek() == b"]":
                    break
                self._expect(reader, b",", f'"," or "]" after entry {len(starts)}')
        reader.skip(1)
        if reader.peek():
            raise self._wrong(reader, "the end of the file after the array")
        self._starts, self._ends = np.array(starts, np.int64), np.array(ends, np.int64)

    def place(self, index: int) -> str:
        return f"{self._path} entry {index + 1}"

    def _object(self, reader: "_Reader", entry: int) -> tuple[int, int]:
        if reader.peek() != b"{":
            raise self._wrong(reader, f'an object such as {{"prompt": "..."}} as entry {entry}')
        start = reader.place
        try:
            reader.skip_object()
        except ValueError as error:
            raise DataError(
                self._field, f"can't read {self._path}: entry {entry}, at byte {start}, is not JSON ({error})"
            ) from error
        return start, reader.place

    def _expect(self, reader: "_Reader", mark: bytes, needed: str) -> None:
        if reader.peek() != mark:
            raise self._wrong(reader, needed)
        reader.skip(1)

    def _wrong(self, reader: "_Reader", needed: str) -> DataError:
        found = repr(reader.peek().decode("latin-1")) if reader.peek() else "the end of the file"
        return DataError(
            self._field, f"can't read {self._path}: at byte {reader.place} is {found}, but {needed} is needed"
        )


class _Reader:
    """A position in a file, with a buffer of the text that follows.

    The text is decoded as Latin-1, in which each letter is one byte: only the places of brackets matter here, and UTF-8
    has no bytes of ASCII within other letters.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._base = 0
        """Offset of the text in the file."""
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    @property
    def place(self) -> int:
        """Offset in the file."""
        return self._base + self._at

    def skip(self, count: int) -> None:
        """Move the position forward."""
        self._at += count

    def peek(self) -> bytes:
        """Move past white space and return the next byte; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at].encode("latin-1")
            if not self._more():
                return b""

    def skip_object(self) -> None:
        """Move past an object. Raises ValueError if it is broken, unterminated, or too large."""
        while True:
            try:
                _, self._at = self._decoder.raw_decode(self._text, self._at)
                return
            except json.JSONDecodeError as error:
                problem = f"{error.msg.removesuffix(' at')}, byte {self._base + error.pos}"
                cut = error.pos >= len(self._text) - _LONGEST_MARK or error.msg.startswith("Unterminated")
                if not cut or len(self._text) - self._at > _MOST or not self._more():
                    raise ValueError(problem) from error

    def _more(self) -> bool:
        """Read more bytes, and forget those before the position. Returns False at the end of the file."""
        offset = self._base + len(self._text)
        # Double the text, so that a large object isn't parsed again for each chunk.
        chunk = os.pread(self._file, max(_CHUNK, len(self._text) - self._at), offset)
        self._base, self._text, self._at = self.place, self._text[self._at :] + chunk.decode("latin-1"), 0
        return bool(chunk)
