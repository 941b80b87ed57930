import pytest
from redis.connection import PythonRespSerializer
from redis.exceptions import DataError

from relaxd.board.resp import LARGE_BYTES, CommandPacker


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


@pytest.mark.parametrize("argument", [None, True, [1]])
def test_an_argument_that_redis_does_not_know_is_refused(argument):
    with pytest.raises(DataError, match=type(argument).__name__):
        CommandPacker().pack("SET", "key", argument)
