"""Columns as bytes: raw little-endian arrays with dtype and shape, JSON values as UTF-8. Loading executes nothing.

A payload is: magic (4 bytes) · length of the header (uint32) · header · the data, each column padded with zeros to a
multiple of 8, so that every array is aligned. The header has a line for each column, in the order of the data: its
name, dtype (numpy's, as "<f4"; "json" for JSON values), shape (as "2,3") and number of bytes, separated by tabs. Its
end is padded with spaces to a multiple of 8.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy import ndarray

from relaxd.board.command_packing import Payload
from relaxd.board.types import Column, ColumnError

MAGIC = b"RXC1"
PREFIX = struct.Struct("<4sI")
PREFIX_BYTES = PREFIX.size
ALIGNMENT = 8
JSON_DTYPE = "json"
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 8
PADDING = [b"\0" * n for n in range(ALIGNMENT)]
DTYPES = {
    dtype.str: dtype
    for dtype in map(np.dtype, ("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "?"))
}

STORED = frozenset(DTYPES.values())


EncodedColumn: TypeAlias = tuple[str, bytes | memoryview, int]
"""Encoded column: its line of a payload's header, its data (an array's memory isn't copied), and the data's size in
bytes."""
HeaderLine: TypeAlias = tuple[str, np.dtype | None, tuple[int, ...], int, int]
"""Parsed line of a payload's header: column name, dtype (None for JSON), shape, and size in bytes without and with
padding."""


def encode_column(name: str, value: Column) -> EncodedColumn:
    """Encode one column.

    Raises ColumnError for a dtype that is not a number or boolean, a value that JSON cannot express (such as NaN), or a
    name that is empty or has control characters.
    """
    if isinstance(value, ndarray):
        array = value
        if value.dtype not in STORED or not value.flags.c_contiguous or value.ndim > MAX_DIMENSIONS:
            array = _storable(name, value)
        size = array.nbytes
        return _line(name, array.dtype, value.shape, size), array.data, size
    data = _json(name, value)
    return _line(name, None, (), len(data)), data, len(data)


def payload_of(columns: Sequence[EncodedColumn]) -> Payload:
    """Join encoded columns into one payload, without copying arrays."""
    lines: list[str] = []
    parts: list[bytes | memoryview] = [b""]
    nbytes = 0
    for line, data, size in columns:
        lines.append(line)
        parts.append(data)
        nbytes += size
        if size % ALIGNMENT:
            parts.append(PADDING[-size % ALIGNMENT])
            nbytes += -size % ALIGNMENT
    parts[0] = header = _header(tuple(lines))
    return Payload(parts, nbytes + len(header))


def encode_columns(columns: Mapping[str, Column]) -> bytes:
    """Encode columns as one payload. Raises ColumnError, as `encode_column` does."""
    return b"".join(payload_of([encode_column(name, value) for name, value in columns.items()]).parts)


def decode_columns(payload: bytes) -> dict[str, Column]:
    """Decode a payload; arrays are read-only views into it.

    Raises ColumnError for an inconsistent payload: wrong magic, sizes beyond the payload, a dtype that is not allowed,
    a shape that does not fit the number of bytes, broken JSON.
    """
    total = len(payload)
    if total < PREFIX_BYTES:
        raise ColumnError(f"a payload of {total} bytes is too short to be columns")
    magic, header_bytes = PREFIX.unpack_from(payload)
    offset = PREFIX_BYTES + header_bytes
    if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or offset > total:
        raise ColumnError("a payload does not start with a columns header")
    columns: dict[str, Column] = {}
    for name, dtype, shape, size, padded in _parse(payload[PREFIX_BYTES:offset]):
        if size > total - offset:
            raise ColumnError(f"column {name!r} says {size} bytes: the payload has {total - offset} left")
        if dtype is None:
            columns[name] = _from_json(name, payload[offset : offset + size])
        else:
            columns[name] = ndarray(shape, dtype, payload, offset)
        offset += padded
    return columns


# Headers repeat (columns of equal shape, empty ones), so both directions are cached.


@lru_cache(maxsize=4096)
def _line(name: str, dtype: np.dtype | None, shape: tuple[int, ...], size: int) -> str:
    """Return a column's line of a payload's header. `dtype`: None for JSON."""
    if not name.isprintable() or not name:
        raise ColumnError(f"column name {name!r} must not be empty or have control characters")
    return f"{name}\t{dtype.str if dtype else JSON_DTYPE}\t{','.join(map(str, shape))}\t{size}"


@lru_cache(maxsize=4096)
def _header(lines: tuple[str, ...]) -> bytes:
    """Return the bytes of a payload that precede its data, from the lines of its header."""
    header = "\n".join(lines).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return PREFIX.pack(MAGIC, len(header)) + header


@lru_cache(maxsize=4096)
def _parse(header: bytes) -> tuple[HeaderLine, ...]:
    """Parse and check the lines of a payload's header. Raises ColumnError."""
    try:
        text = header.decode().rstrip(" ")
        return tuple(_parse_line(*line.split("\t")) for line in text.split("\n")) if text else ()
    except (ValueError, TypeError) as error:  # not UTF-8, not four fields, not numbers
        raise ColumnError(f"a payload's header is broken: {error}") from error


def _parse_line(name: str, dtype: str, shape: str, size: str) -> HeaderLine:
    dimensions, count = tuple(int(n) for n in shape.split(",")) if shape else (), int(size)
    padded = count + -count % ALIGNMENT
    if dtype == JSON_DTYPE and count >= 0:
        return name, None, (), count, padded
    if dtype not in DTYPES:
        raise ColumnError(f"column {name!r} has dtype {dtype!r}: it must be one of {', '.join(DTYPES)}")
    if (
        len(dimensions) > MAX_DIMENSIONS
        or min(dimensions, default=0) < 0
        or math.prod(dimensions) * DTYPES[dtype].itemsize != count
    ):
        raise ColumnError(f"column {name!r} says shape {shape} of {dtype}, but has {size} bytes")
    return name, DTYPES[dtype], dimensions, count, padded


def _storable(name: str, value: ndarray) -> ndarray:
    """Return an array with the same values that is contiguous and little-endian. Raises ColumnError."""
    array = value if value.flags.c_contiguous else np.ascontiguousarray(value)
    dtype = array.dtype
    if dtype.str not in DTYPES:
        if dtype.kind not in "iuf" or dtype.newbyteorder("<").str not in DTYPES:
            raise ColumnError(f"column {name!r} has dtype {dtype}: it must be one of {', '.join(DTYPES)}")
        array = array.astype(dtype.newbyteorder("<"))
    if array.ndim > MAX_DIMENSIONS:
        raise ColumnError(f"column {name!r} has {array.ndim} dimensions: at most {MAX_DIMENSIONS} are stored")
    return array


def _json(name: str, value: Column) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ColumnError(f"column {name!r} is neither an array nor a JSON value: {error}") from error


def _from_json(name: str, data: bytes) -> Column:
    try:
        value: Column = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ColumnError(f"column {name!r} is not JSON: {error}") from error
    return value
