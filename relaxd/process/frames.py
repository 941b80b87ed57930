"""Framing of the JSON messages between parent and child: a length, then the message."""

import json
import struct
from typing import Any

HEADER = struct.Struct("<I")
"""Length of the message that follows, in bytes."""

MAX_FRAME_BYTES = 256 << 20
"""Longest message."""


class FrameError(Exception):
    """The bytes are not a valid message, or the message is too long."""


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as bytes, header included. Raises FrameError when it is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return the body's length from a header. Raises FrameError when it is too long."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {length} bytes is announced; at most {MAX_FRAME_BYTES} are allowed")
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    """Return the message from its body. Raises FrameError when it is not a JSON object."""
    try:
        message = json.loads(body)
    except ValueError as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a message must be a JSON object, not {type(message).__name__}")
    return message
