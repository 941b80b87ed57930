"""Payloads on their way to Redis servers and back, in pieces between which these serve others."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import redis

from relaxd.board.connection import RedisConnection
from relaxd.board.payloads.attempt import Attempt, Place, Slice
from relaxd.board.payloads.nodes import PayloadNodes

T = TypeVar("T")
Placed = TypeVar("Placed", Slice, Place)

BYTES_TOGETHER = 4 << 20
"""Most bytes in one round trip, unless a single value has more: Redis copies a reply before it serves others."""
KEYS_TOGETHER = 64
"""Most keys in one UNLINK: Redis frees strings before it serves others."""
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A writer that is slower than this may be taken for dead."""


def patience(nbytes: int, orphan_seconds: float) -> int:
    """Return the milliseconds that attempts with so many bytes may take from registration to commit."""
    return max(1, int(1000 * (orphan_seconds + nbytes / SLOWEST_BYTES_PER_SECOND)))


def write(nodes: PayloadNodes, attempts: Iterable[Attempt], milliseconds: int) -> None:
    """Write large payloads. Each slice expires after `milliseconds`, unless it is kept."""
    slices = (one for attempt in attempts for one in attempt.slices())
    for together in gather(slices, lambda one: one.data.nbytes, BYTES_TOGETHER):
        for node, of_node in _by_node(together):
            nodes.at(node).pipeline(partial(_queue, commands=writes(of_node, milliseconds)))


def writes(slices: Iterable[Slice], milliseconds: int) -> list[tuple[Any, ...]]:
    """Return the commands that write slices, which expire after `milliseconds`.

    NX: a repeated write, which may arrive at any time after the first, can't make a kept slice expire.
    """
    return [("SET", one.key, one.data, "NX", "PX", milliseconds) for one in slices]


def keep(nodes: PayloadNodes, places: Iterable[Place]) -> set[Place]:
    """Make payloads on data nodes last. Returns those of which a part is missing.

    The committing script does it for payloads on the board's Redis.
    """
    missing = set()
    for node, of_node in _by_node(place for place in places if place.node is not None):
        for together in gather(of_node, lambda place: len(place.keys), KEYS_TOGETHER):
            commands = [(word, key) for place in together for key in place.keys for word in ("PERSIST", "EXISTS")]
            there = nodes.at(node).write(partial(_queue, commands=commands))[1::2]
            lasting = {key for (_, key), found in zip(commands[1::2], there, strict=True) if found}
            missing |= {place for place in together if not lasting.issuperset(place.keys)}
    return missing


def read(nodes: PayloadNodes, places: Collection[Place], *last: Any) -> tuple[dict[Place, bytes | None], Any]:
    """Read payloads; None for those of which a part is missing. Return them with the board's reply to a `last` command.

    The last command, if there is one, comes after all that was read.
    """
    found: dict[str, bytes | None] = {}
    for node, of_node in _by_node(place for place in places if place.node is not None):
        for command in _reads(of_node):
            values = nodes.at(node).pipeline(partial(_queue, commands=[command]))[0]
            found.update(zip(command[1:], values, strict=True))
    commands = _reads(place for place in places if place.node is None)
    for command in commands[:-1]:
        values = nodes.board.pipeline(partial(_queue, commands=[command]))[0]
        found.update(zip(command[1:], values, strict=True))
    replies = nodes.board.pipeline(partial(_queue, commands=[*commands[-1:], *([last] if last else [])]))
    if commands:
        found.update(zip(commands[-1][1:], replies[0], strict=True))
    return {place: _joined(place.keys, found) for place in places}, replies[-1]


def unlink(nodes: PayloadNodes, places: Iterable[Place]) -> None:
    """Free payloads."""
    for node, of_node in _by_node(places):
        unlink_keys(nodes.at(node), (key for place in of_node for key in place.keys))


def unlink_keys(connection: RedisConnection, keys: Iterable[str]) -> None:
    """Free keys of one server."""
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


def _reads(places: Iterable[Place]) -> list[tuple[str, ...]]:
    """Return the commands that read payloads of one server."""
    sizes = [(key, place.nbytes // len(place.keys)) for place in places for key in place.keys]
    return [("MGET", *(key for key, _ in together)) for together in gather(sizes, lambda one: one[1], BYTES_TOGETHER)]


def _by_node(items: Iterable[Placed]) -> list[tuple[int | None, list[Placed]]]:
    """Sort slices or places by their data node."""
    by_node: dict[int | None, list[Placed]] = {}
    for item in items:
        by_node.setdefault(item.node, []).append(item)
    return list(by_node.items())


def _joined(keys: tuple[str, ...], found: dict[str, bytes | None]) -> bytes | None:
    """Return the slices of a payload together; None if one is missing."""
    if len(keys) == 1:
        return found[keys[0]]
    slices = [data for key in keys if (data := found[key]) is not None]
    return b"".join(slices) if len(slices) == len(keys) else None
