"""Columns as payloads under Redis keys.

The columns of one commit are an attempt with a unique name. Its small columns share a payload, which the committing
script stores. Each large column is written before that as a separate payload, so that a stage that needs only the text
does not fetch megabytes. A pointer names the attempt and its large columns: "<attempt>[,<large column>...]". Large
payloads expire unless the script keeps them, so that a dead process leaves nothing behind.
"""

import secrets
from collections.abc import Iterable, Mapping

import numpy as np
import redis

from relaxd.board.columns import encode_columns
from relaxd.board.types import Column

LARGE_BYTES = 64 * 1024
"""An array of at least this size gets a separate payload."""


class Attempt:
    """Columns to write under a name that was never used before."""

    def __init__(self, prefix: str, name: str, columns: Mapping[str, Column]) -> None:
        large = [c for c, value in columns.items() if isinstance(value, np.ndarray) and value.nbytes >= LARGE_BYTES]
        small = {column: value for column, value in columns.items() if column not in large} if large else columns
        self.pointer = ",".join((name, *large))
        self.shared = encode_columns(small)
        """The payload of the small columns, for the script to store."""
        self.large = [
            (f"{prefix}columns:{name}:{column}", encode_columns({column: columns[column]})) for column in large
        ]
        """(key, payload) pairs to write before the script runs."""
        self.nbytes = len(self.shared) + sum(len(payload) for _, payload in self.large)
        """Bytes of all payloads."""


def new_names(group_ids: Iterable[str]) -> list[str]:
    """Make a unique attempt name for each group."""
    token = secrets.token_hex(6)
    return [f"{group_id}.{token}{index:x}" for index, group_id in enumerate(group_ids)]


def write(pipe: redis.client.Pipeline, attempts: Iterable[Attempt], expire_seconds: float) -> None:
    """Queue writes of the large payloads. They are NX, so that a retry cannot make a kept payload expire."""
    milliseconds = max(1, int(expire_seconds * 1000))
    for attempt in attempts:
        for key, payload in attempt.large:
            pipe.execute_command("SET", key, payload, "NX", "PX", milliseconds)


def place(prefix: str, pointer: str, columns: Iterable[str]) -> dict[str, str]:
    """Return the payload key of each of a writer's columns."""
    name, *large = pointer.split(",")
    shared = f"{prefix}columns:{name}"
    return {column: f"{shared}:{column}" if column in large else shared for column in columns}


def keys(prefix: str, pointer: str) -> list[str]:
    """Return the keys of an attempt's payloads."""
    name, *large = pointer.split(",")
    shared = f"{prefix}columns:{name}"
    return [shared, *(f"{shared}:{column}" for column in large)]
