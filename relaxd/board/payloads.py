"""How columns become payloads under keys, and come back.

What one commit writes is an attempt with a name of its own: its small columns share a payload, a large one gets its
own, so that a stage that needs only the text does not fetch megabytes. A pointer names the attempt and its large
columns: "<attempt>[,<large column>...]". Payloads expire until a script that sets the pointer keeps them, so what a
dead process left behind sweeps itself.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import redis

from relaxd.board.columns import column_bytes, decode_columns, encode_columns
from relaxd.board.types import Column

LARGE_BYTES = 64 * 1024
"""An array of at least this size gets a payload of its own."""


class Attempt:
    """Columns that are about to be written: the pointer, and payloads as (key, bytes)."""

    def __init__(self, prefix: str, group_id: str, columns: Mapping[str, Column]) -> None:
        name = f"{group_id}.{secrets.token_hex(6)}"
        large = {column: value for column, value in columns.items() if column_bytes(value) >= LARGE_BYTES}
        small = {column: value for column, value in columns.items() if column not in large} if large else columns
        self.pointer = ",".join((name, *large))
        self.payloads = [(f"{prefix}columns:{name}", encode_columns(small))]
        for column, value in large.items():
            self.payloads.append((f"{prefix}columns:{name}:{column}", encode_columns({column: value})))


def write(pipe: redis.client.Pipeline, attempts: Iterable[Attempt], expire_seconds: float) -> None:
    """Queue the payloads. Writing again does nothing, so that a repeated write cannot make a kept payload expire."""
    milliseconds = max(1, int(expire_seconds * 1000))
    for attempt in attempts:
        for key, payload in attempt.payloads:
            pipe.execute_command("SET", key, payload, "NX", "PX", milliseconds)


def key_of(prefix: str, pointer: str, column: str) -> str:
    """The key of the payload that holds a column."""
    name, *large = pointer.split(",")
    return f"{prefix}columns:{name}:{column}" if column in large else f"{prefix}columns:{name}"


def read(client: Any, keys: list[str]) -> Iterator[tuple[str, dict[str, Column] | None]]:
    """The columns of payloads, in one round trip; None for a payload that is not there. Raises ColumnError."""
    for key, payload in zip(keys, client.mget(keys), strict=True):
        yield key, None if payload is None else decode_columns(payload)
