"""What ranks send each other arrives as it was, and nothing else is taken for a message."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.trainer.megatron.rank_messages import MessageError, command, decode, encode, message, parse


@message
@dataclass(frozen=True)
class Command:
    name: str
    parts: tuple[tuple[int, ...], ...]
    columns: Mapping[str, Any]
    folder: Path = Path("none")


@dataclass(frozen=True)
class Unknown:
    name: str


@command
def registered() -> None:
    """Called by other ranks."""


def copied(value: Any) -> Any:
    parts = encode(value)
    node, sizes = parse(parts[0])
    assert sizes == [part.nbytes for part in parts[1:]]
    return decode(node, [memoryview(bytes(part)) for part in parts[1:]])


def test_values_arrive_as_they_were() -> None:
    values = (
        None,
        True,
        -(1 << 60),
        0.1 + 0.2,
        float("inf"),
        "é\n$",
        [1, [2, (3, frozenset({4}))], set()],
        {"$": "array", 5: {"dtype": "x"}, (1, 2): ()},
        Path("runs/a b"),
        Command("a", ((1, 2), ()), {"$": 1}, Path("/tmp")),
        registered,
        {"a": Command("$", (), {})},
    )
    for value in values:
        found = copied(value)
        assert found == value
        assert type(found) is type(value)
    assert np.isnan(copied(float("nan")))
    assert copied(np.float32(0.1)) == float(np.float32(0.1))


def test_arrays_arrive_with_their_bits_and_cannot_be_written_to() -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([np.nan, -0.0, 1e-45], np.float32),
        np.zeros((0, 4), np.uint8),
        np.array(7, np.int64),
        np.array([True, False]),
        np.arange(10, dtype=np.float64)[::3],
    ]
    sent = Command("columns", (), {str(place): array for place, array in enumerate(arrays)})
    received = copied([sent, arrays[0]])
    pairs: list[tuple[Any, Any]] = list(
        zip([*arrays, arrays[0]], [*received[0].columns.values(), received[1]], strict=True)
    )
    for array, found in pairs:
        assert found.tobytes() == array.tobytes()
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        with pytest.raises(ValueError, match="read-only"):
            found[...] = 0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Unknown("a"), "Unknown can't be sent"),
        ([print], "builtin_function_or_method can't be sent"),
        (copied, "function can't be sent"),
        ({"a": np.array([object()])}, "an array of object can't be sent"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, named: str) -> None:
    with pytest.raises(MessageError, match=named):
        encode(value)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "message", "name": "os.system", "values": {"command": "true"}},
        {"$": "message", "name": f"{__name__}.Command", "values": {"wrong": 1}},
        {"$": "command", "name": "os.system"},
        {"$": "unheard of"},
        {"no": "kind"},
        {"$": "array", "dtype": "<i4", "shape": [1]},
    ],
)
def test_what_is_no_message_is_refused(node: Any) -> None:
    with pytest.raises(MessageError):
        decode(parse(memoryview(json.dumps(node).encode()))[0], [])
    with pytest.raises(MessageError, match="not a message"):
        parse(memoryview(b"{"))
