"""Messages between a confined process and the one that watches it: JSON, with its length before it."""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("=I")


class ChannelClosed(Exception):
    """The other side is gone, or what it sent is no message."""


class TooLong(Exception):
    """A message is longer than allowed."""


class Channel:
    """One end of a stream socket."""

    def __init__(self, end: socket.socket, longest: int = (1 << 32) - 1) -> None:
        """`longest` is the most bytes of a message that is received."""
        self.socket = end
        self._longest = longest

    def send(self, message: Any, left: Callable[[], float] | None = None) -> None:
        """Send a message. `left` returns the seconds that are left, and raises when there are none.

        Raises ChannelClosed.
        """
        text = json.dumps(message).encode()
        waiting = memoryview(_LENGTH.pack(len(text)) + text)
        try:
            while waiting:
                waiting = waiting[self._within(left, self.socket.send, waiting) :]
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, left: Callable[[], float] | None = None) -> Any:
        """Return the next message, see `send`. Raises ChannelClosed, TooLong."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, left))
        if length > self._longest:
            raise TooLong(f"a message of {length} bytes")
        try:
            return json.loads(self._exactly(length, left))
        except (ValueError, RecursionError) as error:
            raise ChannelClosed(f"no message: {error}") from error

    def close(self) -> None:
        """Close this end."""
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
