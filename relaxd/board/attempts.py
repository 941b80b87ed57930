"""Payloads of groups: the keys of each attempt at a commit, the samples to show to people, and the data nodes that
store payloads.

Small columns share a payload, which is stored by the committing script or in one transaction with it. A large column
is a separate payload, written before the script in slices: no script handles its bytes, Redis serves others between
two slices, and a stage that needs only the text doesn't fetch megabytes. A pointer names an attempt and says what is
stored: "<name>:<bytes>[,<column>:<bytes>:<slices>[@<node>]]...", where the first bytes are those of the shared payload.
Its keys are "columns:<name>:<bytes>" and, from 0 on, "columns:<name>:<bytes>:<column>:<slice>". A payload with a node
is on that data node (board.data_urls, from 0 on), which a hash of its key chooses; all others are on the board's Redis.

Large payloads are on data nodes, if there are any; pointers, scripts and small columns never are.

Samples to show to people are always on the board's Redis: they are few, and only the newest are kept.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from relaxd.board.column_encoding import decode_columns, encode_column, payload_of
from relaxd.board.command_packing import Payload
from relaxd.board.sizes import NO_EVICTION, RedisMemory
from relaxd.board.types import Column, ColumnError
from relaxd.config import LARGE_COLUMN_BYTES
from relaxd.redis_client import parse, where
from relaxd.redis_client.operations import RedisOperation, ask, is_cluster_node

HIGH_WATER = 0.8
"""Share of a data node's maxmemory that the payloads of open groups may take."""
UNLIMITED_SHARE = 0.25
"""Memory limit assumed for a data node without a maxmemory, as a share of its machine's memory."""


def node_of(payload: str, nodes: int) -> int:
    """Return the index of a payload's data node: a hash of its name spreads payloads evenly."""
    return crc32(payload.encode()) % nodes


def memory(nodes: int) -> RedisOperation[RedisMemory | None]:
    """Return the total memory of all data nodes, as if each were as small as the smallest and as full as the fullest.

    Payloads are spread evenly, so the first full node stops the run. Returns None without data nodes.
    """
    found = []
    for node in range(nodes):
        found.append(_memory((yield from ask("INFO", "memory", at=node))))
    if not found:
        return None
    policies = [memory.policy for memory in found if memory.policy != NO_EVICTION]
    return RedisMemory(
        used=len(found) * max(memory.used for memory in found),
        max_bytes=len(found) * min(memory.max_bytes for memory in found),
        high_water=len(found) * min(memory.high_water for memory in found),
        policy=policies[0] if policies else NO_EVICTION,
    )


def problems(board: str, nodes: Sequence[str]) -> RedisOperation[list[str]]:
    """Return the faults of data nodes: nodes of a cluster, servers under two names. Raises BoardUnavailable.

    `board`: the URL of the board's Redis; `nodes`: those of the data nodes.
    """
    names: dict[str, str] = {}
    found = []
    for node, url in ((None, board), *enumerate(nodes)) if nodes else ():
        name = where(url)
        server = str((yield from ask("INFO", "server", at=node))["run_id"])
        if server in names:
            found.append(f"{name} and {names[server]} are one server")
        elif not parse(url).nodes and (yield from is_cluster_node(at=node)):
            found.append(f"{name} is a node of a Redis Cluster (cluster_enabled:1): name a server of its own")
        names[server] = name
    return found


def _memory(facts: dict[str, Any]) -> RedisMemory:
    most = int(facts["maxmemory"]) or int(facts["total_system_memory"] * UNLIMITED_SHARE)
    return RedisMemory(int(facts["used_memory"]), most, int(most * HIGH_WATER), str(facts["maxmemory_policy"]))


SLICE_BYTES = 1 << 20
"""Maximum size of one slice of a payload (the value of one Redis key), in bytes."""
SEPARATORS = frozenset(",:|@")
"""Characters that the name of a large column must not have: they separate parts of pointers, and lists of pointers."""


class Slice(NamedTuple):
    """Slice of a large payload, with its key and its server."""

    node: int | None
    """Index of the data node that stores the slice; None: the board's Redis."""
    key: str
    data: Payload


class Attempt:
    """Encoded columns of a group, to be written to Redis under a new attempt name."""

    __slots__ = ("_large", "_name", "_nodes", "_prefix", "large_bytes", "nbytes", "pointer", "shared")

    def __init__(
        self,
        prefix: str,
        name: str,
        columns: Mapping[str, Column],
        *,
        nodes: int = 0,
        large_bytes: int = LARGE_COLUMN_BYTES,
    ) -> None:
        """Encode columns under the attempt's name. Raises ColumnError.

        `prefix`: that of the run's keys. `nodes`: number of data nodes. A column of at least `large_bytes` gets a
        separate payload.
        """
        small = []
        self._large: dict[str, Payload] = {}
        self.large_bytes = 0
        """Total size of the large payloads, in bytes: they are written before the committing script runs."""
        for column, value in columns.items():
            encoded = encode_column(column, value)
            if encoded[2] < large_bytes:
                small.append(encoded)
                continue
            if SEPARATORS & set(column):
                raise ColumnError(f"column {column!r}: the name of a large column must not have ',', ':', '|' or '@'")
            self._large[column] = payload_of([encoded])
            self.large_bytes += self._large[column].nbytes
        self._prefix = prefix
        self._nodes = nodes
        self.shared = payload_of(small)
        """Payload that contains all small columns."""
        self.nbytes = self.shared.nbytes + self.large_bytes
        """Total size of all of the attempt's payloads, in bytes."""
        self.rename(name)

    def rename(self, name: str) -> None:
        """Give the attempt a new name. Payloads that were written under the old name are then not used."""
        self._name = self.pointer = f"{name}:{self.shared.nbytes}"
        if not self._large:
            return
        large = (f",{column}:{one.nbytes}:{-(-one.nbytes // SLICE_BYTES)}" for column, one in self._large.items())
        if self._nodes:
            large = (f"{one}@{node_of(f'{self._name}{one}', self._nodes)}" for one in large)
        self.pointer += "".join(large)

    @property
    def shared_key(self) -> str:
        """Redis key of the payload that contains all small columns."""
        return f"{self._prefix}columns:{self._name}"

    @property
    def on_nodes(self) -> bool:
        """True if the attempt has payloads on data nodes."""
        return bool(self._nodes and self._large)

    def slices(self) -> Iterator["Slice"]:
        """Yield each slice of the large payloads, one at a time."""
        if not self._large:
            return
        placed = all_places(self._prefix, self.pointer)[1:]
        for payload, place in zip(self._large.values(), placed, strict=True):
            for key, data in zip(place.keys, _cut(payload), strict=True):
                yield Slice(place.node, key, data)


def new_names(group_ids: Iterable[str]) -> list[str]:
    """Make a unique attempt name for each group."""
    token = secrets.token_hex(6)
    return [f"{group_id}.{token}{index:x}" for index, group_id in enumerate(group_ids)]


@dataclass(slots=True, eq=False)
class Place:
    """Storage location of a payload: its keys and its server."""

    keys: tuple[str, ...]
    """Keys of the payload's slices, in order. No other payload has these keys."""
    nbytes: int
    node: int | None = None
    """Index of the data node that stores the payload; None: the board's Redis."""


def places(prefix: str, pointer: str, columns: Iterable[str]) -> dict[str, Place]:
    """Return for each column where its payload is stored. Raises ValueError if the pointer is damaged."""
    if "," not in pointer:  # nothing is large
        return dict.fromkeys(columns, _shared_place(prefix, pointer))
    shared, large = _parse(prefix, pointer)
    return {column: large.get(column, shared) for column in columns}


def all_places(prefix: str, pointer: str) -> list[Place]:
    """Return where all payloads of a pointer are stored. Raises ValueError if the pointer is damaged."""
    shared, large = _parse(prefix, pointer)
    return [shared, *large.values()]


def _parse(prefix: str, pointer: str) -> tuple[Place, dict[str, Place]]:
    """Return where a pointer's payloads are stored: the payload of small columns, and that of each large column."""
    name, _, rest = pointer.partition(",")
    shared = _shared_place(prefix, name)
    (key,) = shared.keys
    large: dict[str, Place] = {}
    for part in rest.split(",") if rest else ():
        column, size, slices = part.split(":")
        count, at, node = slices.partition("@")
        if int(count) < 1:
            raise ValueError(f"pointer {pointer!r}: column {column!r} has no slices")
        keys = tuple(f"{key}:{column}:{index}" for index in range(int(count)))
        large[column] = Place(keys, int(size), int(node) if at else None)
    return shared, large


def _shared_place(prefix: str, name: str) -> Place:
    """Return where the payload of small columns is stored, from the first part of a pointer."""
    return Place((f"{prefix}columns:{name}",), int(name[name.rfind(":") + 1 :]))


def _cut(payload: Payload) -> Iterator[Payload]:
    """Yield the slices of a payload, all of SLICE_BYTES except the last."""
    gathered: list[bytes | memoryview] = []
    room = SLICE_BYTES
    for part in payload.parts:
        rest = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        while rest:
            gathered.append(rest[:room])
            room -= len(gathered[-1])
            rest = rest[len(gathered[-1]) :]
            if not room:
                yield Payload(gathered, SLICE_BYTES)
                gathered, room = [], SLICE_BYTES
    if gathered:
        yield Payload(gathered, SLICE_BYTES - room)


SHOWN_BYTES = 16 << 20
"""Maximum size of the samples to show to people, in bytes: of one step (except that its first sample is always kept),
and of all steps in Redis together."""


def samples_attempt(prefix: str, step: int, samples: Sequence[Mapping[str, Any]]) -> tuple[int, Attempt]:
    """Encode a step's samples to show to people, as many as fit into SHOWN_BYTES.

    Returns their number, and the attempt with which to write them.
    """
    columns = {}
    left = SHOWN_BYTES
    for index, sample in enumerate(samples):
        text = json.dumps(sample).encode()
        left -= len(text)
        if index and left < 0:
            break
        columns[str(index)] = np.frombuffer(text, np.uint8)
    return len(columns), Attempt(prefix, new_names([f"step-{step}"])[0], columns, large_bytes=0)


def sample_places(prefix: str, pointer: str, indices: Sequence[int]) -> list[Place]:
    """Return where a step's samples with these indices are stored. Raises ValueError if the pointer is damaged."""
    names = [str(index) for index in indices]
    placed = places(prefix, pointer, names)
    return [placed[name] for name in names]


def decode_sample(payload: bytes) -> dict[str, Any]:
    """Decode the payload of one sample to show to people. Raises ColumnError, ValueError."""
    (column,) = decode_columns(payload).values()
    sample: dict[str, Any] = json.loads(np.asarray(column).tobytes())
    return sample
