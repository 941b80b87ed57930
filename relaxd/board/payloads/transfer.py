"""Payloads on their way to Redis and back, in pieces between which Redis serves others."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import redis

from relaxd.board.connection import RedisConnection
from relaxd.board.payloads.attempt import Attempt, Place

T = TypeVar("T")

BYTES_TOGETHER = 4 << 20
"""Most bytes in one round trip, unless a single value has more: Redis copies a reply before it serves others."""
KEYS_TOGETHER = 64
"""Most keys in one UNLINK: Redis frees strings before it serves others."""
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A writer that is slower than this may be taken for dead."""


def patience(nbytes: int, orphan_seconds: float) -> int:
    """Return the milliseconds that attempts with so many bytes may take from registration to commit."""
    return max(1, int(1000 * (orphan_seconds + nbytes / SLOWEST_BYTES_PER_SECOND)))


def write(connection: RedisConnection, attempts: Iterable[Attempt], milliseconds: int) -> None:
    """Write large payloads. Each slice expires after `milliseconds`, unless the committing script keeps it.

    NX: a repeated write, which may arrive at any time after the first, can't make a kept slice expire.
    """
    slices = (one for attempt in attempts for one in attempt.slices())
    for together in gather(slices, lambda one: len(one[1]), BYTES_TOGETHER):
        commands = [("SET", key, data, "NX", "PX", milliseconds) for key, data in together]
        connection.pipeline(partial(_queue, commands=commands))


def read(connection: RedisConnection, places: Collection[Place], *last: Any) -> tuple[dict[Place, bytes | None], Any]:
    """Read payloads; None for those of which a part is missing. Return them with the reply of a `last` command."""
    sizes = [(key, place.nbytes // len(place.keys)) for place in places for key in place.keys]
    commands = [
        ("MGET", *(key for key, _ in together)) for together in gather(sizes, lambda one: one[1], BYTES_TOGETHER)
    ]
    found: dict[str, bytes | None] = {}
    for command in commands[:-1]:
        found.update(zip(command[1:], connection.pipeline(partial(_queue, commands=[command]))[0], strict=True))
    *values, reply = connection.pipeline(partial(_queue, commands=[*commands[-1:], last]))
    if commands:
        found.update(zip(commands[-1][1:], values[0], strict=True))
    return {place: _joined([found[key] for key in place.keys]) for place in places}, reply


def unlink(connection: RedisConnection, keys: Iterable[str]) -> None:
    """Free keys."""
    for together in gather(keys, lambda key: 1, KEYS_TOGETHER):
        connection.write(partial(_queue, commands=[("UNLINK", *together)]))


def gather(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Gather items, in order, into lists whose sizes add up to at most `most`, or of one item that is larger."""
    together: list[T] = []
    total = 0
    for item in items:
        if together and total + size(item) > most:
            yield together
            together, total = [], 0
        together.append(item)
        total += size(item)
    if together:
        yield together


def _queue(pipe: redis.client.Pipeline, commands: Iterable[tuple[Any, ...]]) -> None:
    for command in commands:
        pipe.execute_command(*command)


def _joined(slices: list[bytes | None]) -> bytes | None:
    if len(slices) == 1:
        return slices[0]
    present = [part for part in slices if part is not None]
    return b"".join(present) if len(present) == len(slices) else None
