import numpy as np
import pytest
from redis.connection import PythonRespSerializer
from redis.exceptions import DataError

from relaxd.board.command_packing import LARGE_BYTES, CommandPacker, Payload


def encode(argument):
    return argument if isinstance(argument, bytes) else str(argument).encode()


@pytest.mark.parametrize(
    "arguments",
    [
        ("PING",),
        (b"GET", "key"),
        ("SET", "key", b"\r\n\0", "PX", 5),
        ("SCRIPT LOAD", "return 1"),
        ("EVALSHA", "hash", 1, "p", "ünïcode", b"", "", -3, 2.5),
        ("SET", "key", b"x" * LARGE_BYTES, "NX"),
        ("MSET", "a", b"x" * 10 * LARGE_BYTES, "b", b"y" * LARGE_BYTES),
    ],
)
def test_packs_as_redis_py_does(arguments):
    expected = b"".join(PythonRespSerializer(LARGE_BYTES, encode).pack(*arguments))
    assert b"".join(CommandPacker().pack(*arguments)) == expected


@pytest.mark.parametrize("sizes", [(1, 8), (40, 2 * LARGE_BYTES, 3), (LARGE_BYTES - 1, 1, 8), (0,), ()])
def test_the_parts_of_an_argument_are_sent_as_one(sizes):
    parts = [np.arange(size, dtype=np.uint8).data if size % 2 == 0 else b"x" * size for size in sizes]
    chunks = CommandPacker().pack("SET", "key", Payload(parts, sum(sizes)), "NX")
    assert b"".join(chunks) == b"".join(CommandPacker().pack("SET", "key", b"".join(parts), "NX"))
    large = [part for part, size in zip(parts, sizes, strict=True) if size >= LARGE_BYTES]
    assert [chunk for chunk in chunks if isinstance(chunk, memoryview)] == large  # as they are


@pytest.mark.parametrize("argument", [None, True, [1]])
def test_an_argument_that_redis_does_not_know_is_refused(argument):
    with pytest.raises(DataError, match=type(argument).__name__):
        CommandPacker().pack("SET", "key", argument)
