"""How columns become payloads under keys, and come back.

What one commit writes is an attempt with a name of its own. Its small columns share a payload, which the committing
script itself stores. A large column is written before, and gets a payload of its own, so that a stage that needs only
the text does not fetch megabytes. A pointer names the attempt and its large columns: "<attempt>[,<large column>...]".
Payloads that are written before expire until the script keeps them, so what a dead process left behind sweeps itself.
"""

import secrets
from collections.abc import Iterable, Mapping

import numpy as np
import redis

from relaxd.board.columns import encode_columns
from relaxd.board.types import Column

LARGE_BYTES = 64 * 1024
"""An array of at least this size gets a payload of its own."""


class Attempt:
    """Columns that are about to be written. Its name must never have been used before."""

    def __init__(self, prefix: str, name: str, columns: Mapping[str, Column]) -> None:
        large = [c for c, value in columns.items() if isinstance(value, np.ndarray) and value.nbytes >= LARGE_BYTES]
        small = {column: value for column, value in columns.items() if column not in large} if large else columns
        self.pointer = ",".join((name, *large))
        self.shared = encode_columns(small)
        """The payload of the small columns, for the script to store."""
        self.large = [
            (f"{prefix}columns:{name}:{column}", encode_columns({column: columns[column]})) for column in large
        ]
        """Payloads to write before the script runs, and their keys."""
        self.nbytes = len(self.shared) + sum(len(payload) for _, payload in self.large)
        """What it takes in Redis."""


def new_names(group_ids: Iterable[str]) -> list[str]:
    """A name for an attempt on each of these groups, never used before."""
    token = secrets.token_hex(6)
    return [f"{group_id}.{token}{index:x}" for index, group_id in enumerate(group_ids)]


def write(pipe: redis.client.Pipeline, attempts: Iterable[Attempt], expire_seconds: float) -> None:
    """Queue the large payloads. Writing again does nothing: a repeated write cannot make a kept payload expire."""
    milliseconds = max(1, int(expire_seconds * 1000))
    for attempt in attempts:
        for key, payload in attempt.large:
            pipe.execute_command("SET", key, payload, "NX", "PX", milliseconds)


def place(prefix: str, pointer: str, columns: Iterable[str]) -> dict[str, str]:
    """The key of the payload that holds each of a writer's columns."""
    name, *large = pointer.split(",")
    shared = f"{prefix}columns:{name}"
    return {column: f"{shared}:{column}" if column in large else shared for column in columns}
