"""Columns as bytes: raw little-endian arrays with dtype and shape, JSON values as UTF-8. Nothing is ever executed.

A payload is: magic (4 bytes) · length of the header (uint32) · header (JSON: a list of [name, dtype, shape, bytes],
dtype "json" for JSON values, in the order of the data; padded with spaces) · the data, each column padded with zeros to
a multiple of 8 so that every array is aligned.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping

import numpy as np

from relaxd.board.errors import ColumnError
from relaxd.board.types import Column

MAGIC = b"RXC1"
PREFIX = struct.Struct("<4sI")
ALIGNMENT = 8
MAX_HEADER_BYTES = 1 << 20
DTYPES = {
    np.dtype(name).str: np.dtype(name)
    for name in (
        *("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8"),
        *("<f2", "<f4", "<f8", "?"),
    )
}


def column_bytes(value: Column) -> int:
    """How many bytes an array takes; JSON values count as 0 (they are small)."""
    return value.nbytes if isinstance(value, np.ndarray) else 0


def encode_columns(columns: Mapping[str, Column]) -> bytes:
    """One payload that holds all columns.

    Raises ColumnError for a dtype that is not a number or boolean, or a value that JSON cannot express.
    """
    header: list[list[object]] = []
    parts: list[bytes | memoryview] = []
    for name, value in columns.items():
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            if array.dtype.byteorder == ">":
                array = array.astype(array.dtype.newbyteorder("<"))
            dtype = array.dtype.str
            if dtype not in DTYPES:
                raise ColumnError(f"column {name!r} has dtype {value.dtype}: it must be one of {', '.join(DTYPES)}")
            header.append([name, dtype, list(value.shape), array.nbytes])
            parts.append(array.reshape(-1).view(np.uint8).data)
        else:
            try:
                data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                raise ColumnError(f"column {name!r} is neither an array nor a JSON value: {error}") from error
            header.append([name, "json", [], len(data)])
            parts.append(data)
        padding = -parts[-1].nbytes % ALIGNMENT if isinstance(parts[-1], memoryview) else -len(parts[-1]) % ALIGNMENT
        if padding:
            parts.append(b"\0" * padding)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX.size + len(text)) % ALIGNMENT)
    return b"".join([PREFIX.pack(MAGIC, len(text)), text, *parts])


def decode_columns(payload: bytes) -> dict[str, Column]:
    """The columns of a payload; arrays are read-only views into it.

    Raises ColumnError when the header lies: wrong magic, sizes beyond the payload, a dtype that is not allowed, a shape
    that does not fit the number of bytes, broken JSON.
    """
    if len(payload) < PREFIX.size:
        raise ColumnError(f"a payload of {len(payload)} bytes is too short to be columns")
    magic, header_bytes = PREFIX.unpack_from(payload)
    offset = PREFIX.size + header_bytes
    if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or offset > len(payload):
        raise ColumnError("a payload does not start with a columns header")
    try:
        header = json.loads(payload[PREFIX.size : offset])
    except (ValueError, RecursionError) as error:
        raise ColumnError(f"a payload's header is not JSON: {error}") from error
    columns: dict[str, Column] = {}
    if not isinstance(header, list):
        raise ColumnError("a payload's header is not a list")
    for item in header:
        match item:
            case [str(name), str(dtype), [*shape], int(size)] if 0 <= size <= len(payload) - offset:
                columns[name] = _decode(name, dtype, shape, size, payload, offset)
            case _:
                raise ColumnError(f"a payload's header lies: {str(item)[:100]} does not fit {len(payload)} bytes")
        offset += size + -size % ALIGNMENT
    return columns


def _decode(name: str, dtype: str, shape: list[object], size: int, payload: bytes, offset: int) -> Column:
    if dtype == "json":
        try:
            value: Column = json.loads(payload[offset : offset + size])
        except (ValueError, RecursionError) as error:
            raise ColumnError(f"column {name!r} is not JSON: {error}") from error
        return value
    if dtype not in DTYPES:
        raise ColumnError(f"column {name!r} has dtype {dtype!r}: it must be one of {', '.join(DTYPES)}")
    dimensions = [n for n in shape if isinstance(n, int) and n >= 0]
    count = math.prod(dimensions)
    if len(dimensions) != len(shape) or count * DTYPES[dtype].itemsize != size:
        raise ColumnError(f"column {name!r} says shape {shape} of {dtype}, but has {size} bytes")
    return np.frombuffer(payload, DTYPES[dtype], count, offset).reshape(dimensions)
