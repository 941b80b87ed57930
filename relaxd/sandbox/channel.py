"""Messages between a confined process and its watcher: JSON that keeps Python's types, with a length prefix."""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("=I")


class ChannelClosed(Exception):
    """The process at the channel's other end has closed it, or sent an invalid message."""


class TooLong(Exception):
    """A message from the channel's other end exceeds the maximum length."""


class Channel:
    """One end of a stream socket, over which two processes exchange JSON messages."""

    def __init__(self, end: socket.socket, longest: int = (1 << 32) - 1) -> None:
        """Use the socket `end`; `longest` is the maximum length of a received message, in bytes."""
        self.socket = end
        self._longest = longest

    def send(self, message: Any, left: Callable[[], float] | None = None) -> None:
        """Send a message of JSON values. Raises ChannelClosed.

        `left` returns the seconds until the deadline, and raises an exception after the deadline.
        """
        text = json.dumps(message).encode()
        waiting = memoryview(_LENGTH.pack(len(text)) + text)
        try:
            while waiting:
                waiting = waiting[self._within(left, self.socket.send, waiting) :]
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, left: Callable[[], float] | None = None) -> Any:
        """Wait for the next message, and return it. `left` is as in `send`. Raises ChannelClosed, TooLong."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, left))
        if length > self._longest:
            raise TooLong(f"a message of {length} bytes")
        try:
            return json.loads(self._exactly(length, left))
        except (ValueError, RecursionError) as error:
            raise ChannelClosed(f"no message: {error}") from error

    def close(self) -> None:
        """Close this end of the channel."""
        self.socket.close()

    def _exactly(self, count: int, left: Callable[[], float] | None) -> bytes:
        parts, missing = [], count
        while missing:
            try:
                part = self._within(left, self.socket.recv, min(missing, 1 << 16))
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("the other side is gone")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _within(self, left: Callable[[], float] | None, act: Callable[..., Any], given: Any) -> Any:
        while True:
            if left is not None:
                self.socket.settimeout(left())
            try:
                return act(given)
            except TimeoutError:
                continue  # `left` raises when the time is over


class NotPlain(TypeError):
    """A value has a type that can't be sent over a channel."""


def encode(value: Any, name_of: Callable[[Any], str | None] = lambda value: None) -> Any:
    """Convert a Python value to JSON types, from which `decode` restores the value.

    Supports numbers, text, bytes, None, and lists, tuples, sets and dicts of them; numpy's arrays and numbers become
    lists and numbers. `name_of` returns the name of a value that the other process knows by name, such as a function,
    or None. Raises NotPlain for other types, and RecursionError.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, name_of) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, name_of) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, name_of), encode(item, name_of)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {kind: [encode(item, name_of) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if (name := name_of(value)) is not None:
        return {"name": name}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), name_of)
    raise NotPlain(f"a {type(value).__name__} is no plain value")


def decode(given: Any, named: Callable[[str], Any] | None = None) -> Any:
    """Restore the Python value that `encode` converted to JSON types. `named` returns the value with a name.

    Raises ValueError for other input, which an untrusted process may send, and RecursionError.
    """
    if given is None or isinstance(given, bool | int | float | str):
        return given
    if isinstance(given, list):
        return [decode(item, named) for item in given]
    try:
        ((kind, inside),) = given.items()
        if kind == "name" and named is not None:
            return named(inside)
        return _DECODERS[kind](inside, named)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no plain value: {type(error).__name__}: {error}") from error


_DECODERS: dict[str, Callable[[Any, Callable[[str], Any] | None], Any]] = {
    "tuple": lambda inside, named: tuple(decode(item, named) for item in inside),
    "dict": lambda inside, named: {decode(key, named): decode(item, named) for key, item in inside},
    "set": lambda inside, named: {decode(item, named) for item in inside},
    "frozenset": lambda inside, named: frozenset(decode(item, named) for item in inside),
    "bytes": lambda inside, named: bytes.fromhex(inside),
    "complex": lambda inside, named: complex(*inside),
}
