"""Transfer of payloads to and from Redis in pieces, between which Redis serves other clients."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from relaxd.board.attempts import Attempt, Place, Slice
from relaxd.redis_client.operations import At, Command, RedisOperation, Send, ask

T = TypeVar("T")
Placed = TypeVar("Placed", Slice, Place)

BYTES_TOGETHER = 4 << 20
"""Maximum size of the values in one round trip, in bytes, unless a single value is larger: Redis copies a whole reply
before it serves other clients."""
KEYS_TOGETHER = 64
"""Maximum number of keys in one UNLINK: Redis frees strings before it serves other clients."""
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""Minimum speed of a process that writes payloads, in bytes per second; a slower one may be taken for dead."""


def patience(nbytes: int, orphan_seconds: float) -> int:
    """Return the maximum time from registration to commit of attempts with `nbytes` of payloads, in milliseconds."""
    return max(1, int(1000 * (orphan_seconds + nbytes / SLOWEST_BYTES_PER_SECOND)))


def write(attempts: Iterable[Attempt], milliseconds: int) -> RedisOperation[None]:
    """Write the large payloads of attempts. Each slice expires after `milliseconds`, unless it is made permanent."""
    slices = (one for attempt in attempts for one in attempt.slices())
    for together in gather(slices, lambda one: one.data.nbytes, BYTES_TOGETHER):
        for node, of_node in _by_node(together):
            yield Send(writes(of_node, milliseconds), node)


def writes(slices: Iterable[Slice], milliseconds: int) -> list[Command]:
    """Return the commands that write slices, which expire after `milliseconds`.

    NX: a repeated write, which may arrive at any time after the first, can't make a kept slice expire.
    """
    return [("SET", one.key, one.data, "NX", "PX", milliseconds) for one in slices]


def keep(places: Iterable[Place]) -> RedisOperation[set[Place]]:
    """Make payloads on data nodes permanent. Returns the places of the payloads that lack a slice.

    For payloads on the board's Redis, the committing script does this.
    """
    missing = set()
    for node, of_node in _by_node(place for place in places if place.node is not None):
        for together in gather(of_node, lambda place: len(place.keys), KEYS_TOGETHER):
            commands = [(word, key) for place in together for key in place.keys for word in ("PERSIST", "EXISTS")]
            replies = yield Send(commands, node, how="write")
            lasting = {key for (_, key), found in zip(commands[1::2], replies[1::2], strict=True) if found}
            missing |= {place for place in together if not lasting.issuperset(place.keys)}
    return missing


def read(places: Iterable[Place], *last: Any) -> RedisOperation[tuple[dict[str, bytes | None], Any]]:
    """Read payloads. Returns them by the first key of each, and the board's reply to a `last` command.

    A payload that lacks a slice is None. The last command, if any, runs after all reads.
    """
    found: dict[str, bytes | None] = {}
    on_board: list[Place] = []
    on_nodes: list[Place] = []
    sliced: list[Place] = []
    for place in places:
        (on_board if place.node is None else on_nodes).append(place)
        if len(place.keys) > 1:
            sliced.append(place)
    for node, of_node in _by_node(on_nodes):
        for command in _reads(of_node):
            found.update(zip(command[1:], (yield from ask(*command, at=node)), strict=True))
    commands = _reads(on_board)
    for command in commands[:-1]:
        found.update(zip(command[1:], (yield from ask(*command)), strict=True))
    replies = yield Send([*commands[-1:], *([last] if last else [])])
    if commands:
        found.update(zip(commands[-1][1:], replies[0], strict=True))
    for place in sliced:
        slices = [data for key in place.keys if (data := found[key]) is not None]
        found[place.keys[0]] = b"".join(slices) if len(slices) == len(place.keys) else None
    return found, replies[-1]


def unlink(places: Iterable[Place]) -> RedisOperation[None]:
    """Delete the keys of payloads from Redis."""
    for node, of_node in _by_node(places):
        yield from unlink_keys((key for place in of_node for key in place.keys), at=node)


def unlink_keys(keys: Iterable[str], at: At = None) -> RedisOperation[None]:
    """Delete keys from one server, at most KEYS_TOGETHER with each command."""
    for together in gather(keys, lambda key: 1, KEYS_TOGETHER):
        yield Send([("UNLINK", *together)], at, how="write")


def gather(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Group items, in order, into lists whose sizes add up to at most `most`. A larger item gets a list to itself."""
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


def _reads(places: Iterable[Place]) -> list[Command]:
    """Return the MGET commands that read payloads from one server, with at most BYTES_TOGETHER for each."""
    commands: list[list[Any]] = []
    left = 0
    for place in places:
        each = place.nbytes // len(place.keys)
        for key in place.keys:
            if not commands or each > left:
                commands.append(["MGET"])
                left = BYTES_TOGETHER
            commands[-1].append(key)
            left -= each
    return [tuple(command) for command in commands]


def _by_node(items: Iterable[Placed]) -> list[tuple[int | None, list[Placed]]]:
    """Group slices or places by data node. Returns pairs of a node (None: the board's Redis) and its items."""
    by_node: dict[int | None, list[Placed]] = {}
    for item in items:
        by_node.setdefault(item.node, []).append(item)
    return list(by_node.items())
