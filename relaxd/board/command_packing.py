"""RESP packing of Redis commands. redis-py's own packers take milliseconds for a command with a megabyte."""

from dataclasses import dataclass

from redis.exceptions import DataError

LARGE_BYTES = 6000
"""Minimum size in bytes of a command's argument, or part of one, that is sent without being copied."""
LENGTHS = [b"$%d\r\n" % length for length in range(LARGE_BYTES)]


@dataclass(slots=True)
class Payload:
    """Argument of a Redis command, in parts that are sent one after the other, such as a header and an array."""

    parts: list[bytes | memoryview]
    nbytes: int
    """Total size of the parts, in bytes."""


class CommandPacker:
    """Packs Redis commands in the RESP protocol, for redis-py's connections."""

    def pack(self, *arguments: str | bytes | int | float | Payload) -> list[bytes | memoryview]:
        """Pack a command into chunks to send in order. Raises DataError for an argument of another type."""
        name = arguments[0].encode() if isinstance(arguments[0], str) else arguments[0]
        words = name.split() if isinstance(name, bytes) else [name]  # redis-py's names may be two words
        chunks: list[bytes | memoryview] = []
        parts: list[bytes | memoryview] = [b"*%d\r\n" % (len(words) + len(arguments) - 1)]
        for argument in (*words, *arguments[1:]):
            if isinstance(argument, str):
                data = argument.encode()
            elif type(argument) is bytes:
                data = argument
            elif type(argument) is Payload:
                if argument.nbytes < LARGE_BYTES:
                    parts += (LENGTHS[argument.nbytes], *argument.parts, b"\r\n")
                    continue
                parts.append(b"$%d\r\n" % argument.nbytes)
                for part in argument.parts:
                    if memoryview(part).nbytes < LARGE_BYTES:
                        parts.append(part)
                    else:
                        chunks += (b"".join(parts), part)
                        parts = []
                parts.append(b"\r\n")
                continue
            elif isinstance(argument, (int, float)) and not isinstance(argument, bool):
                data = repr(argument).encode()
            else:
                raise DataError(f"an argument is a {type(argument).__name__}, not bytes, str, int, float or Payload")
            if len(data) < LARGE_BYTES:
                parts += (LENGTHS[len(data)], data, b"\r\n")
            else:
                parts.append(b"$%d\r\n" % len(data))
                chunks += (b"".join(parts), data)
                parts = [b"\r\n"]
        chunks.append(b"".join(parts))
        return chunks
