"""Base of the board's three sides: the connection, the run's keys, its stages."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from relaxd.board import payload_transfer
from relaxd.board.attempts import Attempt, all_places, new_names
from relaxd.board.column_encoding import decode_columns
from relaxd.board.connection import Servers
from relaxd.board.scripts import run_script, script_call, script_loads
from relaxd.board.stages import PUBLISH, Stage, producers
from relaxd.board.types import (
    BoardError,
    Column,
    ColumnsTooLarge,
    Counts,
    DroppedGroup,
    HeldGroup,
    QueueDepth,
    RunMissing,
    TooLate,
)
from relaxd.config import BoardConfig
from relaxd.redis_client import COORDINATOR, key_prefix, with_access_of
from relaxd.redis_client.operations import Command, RedisOperation, Send, ask, operation

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN_ID_RULE = "must be 1 to 64 letters, digits, dots, dashes and underscores, the first one a letter or digit"
RESERVED_RUN_ID = COORDINATOR
"""Reserved run id: keys under relaxd:{RUN_ID}: with this id are the coordinator's own."""
WORKERS = "workers"
WRITES = 3
"""Maximum number of times that a commit's large payloads are written, if earlier commits came too late."""


class GroupAttempt(NamedTuple):
    """Attempt to write the columns of one stage, or of "publish", to one group."""

    group_id: str
    stage: str
    attempt: Attempt


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Convert errors of the block, which parses a value from Redis, into BoardError. `what` names the value."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(what, error) from error


def damaged(what: str, error: Exception) -> BoardError:
    """Return the error for a value in Redis that can't be parsed."""
    return BoardError(f"{what} is damaged in Redis: {error!r}")


class BoardCore:
    """Base class of the sides of a run's board, with the operations that all of them have."""

    connect_to: Callable[..., Any]
    """Class of connections to a Redis server: blocking, or for asyncio (relaxd.board.worker)."""

    def __init__(
        self,
        redis_url: str,
        run_id: str,
        stages: Sequence[Stage],
        limits: BoardConfig,
        *,
        timeout_seconds: float = 5.0,
        retry_seconds: float = 10.0,
        orphan_seconds: float = 60.0,
    ) -> None:
        if not RUN_ID.fullmatch(run_id) or run_id == RESERVED_RUN_ID:
            raise ValueError(f"run id {run_id!r}: it {RUN_ID_RULE}, and not {RESERVED_RUN_ID!r}")
        script_loads()  # reads the files: a process that may open no more of them can still hand its groups back
        self.run_id = run_id
        self.prefix = key_prefix(run_id)
        self.stages = tuple(stages)
        self.limits = limits
        self.orphan_seconds = orphan_seconds
        settings = {"tag": run_id, "timeout_seconds": timeout_seconds, "retry_seconds": retry_seconds}
        self._redis_seconds = timeout_seconds
        self._connection = self.connect_to(redis_url, **settings)
        self._nodes: Servers[Any] = Servers(
            lambda url: self.connect_to(with_access_of(url, redis_url), **settings), self._connection, limits.data_urls
        )
        self._by_name = {stage.name: stage for stage in self.stages}
        self._producers = producers(self.stages)
        self._routes = json.dumps([[stage.name, self._writers(stage)] for stage in self.stages])

    @operation
    def counts(self) -> RedisOperation[Counts]:
        """Read the group counts of the conservation law (see `Counts.check`), in one transaction. Raises RunMissing."""
        names = ("published", "trained", "dropped", "last_step", "consecutive_drops", "consecutive_filtered")
        commands = [
            ("HMGET", f"{self.prefix}state", *names),
            ("SCARD", f"{self.prefix}open"),
            ("HGETALL", f"{self.prefix}drops"),
        ]
        state, open_groups, reasons = yield Send(commands, how="atomic")
        if state[0] is None:
            raise RunMissing(f"run {self.run_id} is not on the board")
        values = {name: int(value) for name, value in zip(names, state, strict=True)}
        by_reason = {reason.decode(): int(count) for reason, count in reasons.items()}
        return Counts(open=open_groups, dropped_by_reason=by_reason, **values)

    @operation
    def open_groups(self) -> RedisOperation[list[str]]:
        """Return the ids of the open groups, sorted."""
        members = yield from ask("SMEMBERS", f"{self.prefix}open")
        return sorted(member.decode() for member in members)

    @operation
    def dropped(self, limit: int = 100) -> RedisOperation[list[DroppedGroup]]:
        """Return records of dropped groups, newest first; Redis keeps the last few hundred. Raises ColumnError."""
        entries = yield from ask("XREVRANGE", f"{self.prefix}dropped", "+", "-", "COUNT", limit)
        with reading(f"the record of dropped groups of run {self.run_id}"):
            return [
                DroppedGroup(
                    group_id=fields[b"group"].decode(),
                    reason=fields[b"reason"].decode(),
                    stage=fields[b"stage"].decode(),
                    attempt=int(fields[b"attempt"]),
                    time=float(fields[b"time"]),
                    retried=fields[b"retried"] == b"1",
                    columns=decode_columns(fields[b"columns"]) if fields[b"columns"] else {},
                    detail=fields[b"detail"].decode(),
                )
                for _, fields in entries
            ]

    @operation
    def queues(self) -> RedisOperation[list[QueueDepth]]:
        """Count the groups that wait for each stage and are held in it, in the stages' order. Raises RunMissing."""
        streams = [self._stream(stage.name) for stage in self.stages]
        commands = [command for stream in streams for command in (("XLEN", stream), ("XPENDING", stream, WORKERS))]
        replies = yield Send(commands, how="atomic")
        depths = []
        for stage, length, (held, *_) in zip(self.stages, replies[::2], replies[1::2], strict=True):
            depths.append(QueueDepth(stage.name, waiting=length - held, held=held))
        return depths

    @operation
    def oldest_held(self) -> RedisOperation[dict[str, HeldGroup]]:
        """Return the oldest held group of each stage that holds groups. Raises RunMissing."""
        stages = [stage.name for stage in self.stages]
        pending = yield Send(
            [("XPENDING", self._stream(stage), WORKERS, "-", "+", 1) for stage in stages], how="atomic"
        )
        oldest = {stage: found[0] for stage, found in zip(stages, pending, strict=True) if found}
        if not oldest:
            return {}
        entries = yield Send([("XRANGE", self._stream(stage), id, id) for stage, (id, *_) in oldest.items()])
        return {
            stage: HeldGroup(
                group_id=entry[0][1].get(b"group", b"?").decode(),
                holder=holder.decode(),
                enqueued_at=int(id.split(b"-")[0]) / 1000,
                idle_seconds=idle / 1000,
                deliveries=deliveries + int(entry[0][1].get(b"attempts", 0)),
            )
            for (stage, (id, holder, idle, deliveries)), entry in zip(oldest.items(), entries, strict=True)
            if entry  # else it was committed meanwhile
        }

    def needs(self, stage: str) -> tuple[str, ...]:
        """Return the names of the columns that a stage of the run reads."""
        return self._by_name[stage].needs

    def writes(self, stage: str) -> tuple[str, ...]:
        """Return the names of the columns that a stage of the run writes."""
        return self._by_name[stage].writes

    def client_attributes(self, consumer: str) -> dict[str, str]:
        """Return the attributes that spans of a stage's consumer have."""
        names = {"messaging.consumer.group.name": WORKERS, "messaging.client.id": consumer}
        return {"relaxd.run_id": self.run_id, **names}

    def _attempt(self, name: str, columns: Mapping[str, Column]) -> Attempt:
        """Return an attempt with this name to write these columns. Raises ColumnError."""
        large = self.limits.large_column_bytes
        return Attempt(self.prefix, name, columns, nodes=len(self._nodes.data), large_bytes=large)

    def _stream(self, stage: str) -> str:
        if stage not in self._by_name:
            raise ValueError(f"stage {stage!r} is not in run {self.run_id}, which has {', '.join(self._by_name)}")
        return f"{self.prefix}stage:{stage}"

    def _writers(self, stage: Stage) -> list[str]:
        """Return the stages, or "publish", that write the columns which a stage reads."""
        return sorted({self._producers.get(column, PUBLISH) for column in stage.needs} or {PUBLISH})

    def _state(self, field: str) -> RedisOperation[bytes]:
        value: bytes | None = yield from ask("HGET", f"{self.prefix}state", field)
        if value is None:
            raise RunMissing(f"run {self.run_id} is not on the board")
        return value

    def _check_size(self, group_id: str, what: str, attempt: Attempt) -> None:
        """Raise ColumnsTooLarge if the attempt's columns exceed board.max_group_bytes."""
        if attempt.nbytes > self.limits.max_group_bytes:
            raise ColumnsTooLarge(
                f"group {group_id}: {what} takes {attempt.nbytes} bytes; board.max_group_bytes allows "
                f"{self.limits.max_group_bytes}"
            )

    def _commit_attempts(
        self,
        attempts: Sequence[GroupAttempt],
        script: str,
        arguments: Callable[[list[int]], Sequence[Any]],
        *,
        set_values: bool = False,
    ) -> RedisOperation[list[int]]:
        """Write large payloads and run the script that points to them: in one round trip, if the payloads are small.

        `arguments` gets the indices of the attempts to commit, and returns the script's arguments. The script returns
        one reply for all attempts or a list with one for each: 1 or more (committed), 0 (nobody wants it) or -1 (it
        came too late, and is written again under another name); the error TOOLATE means -1 for all. With `set_values`,
        the payloads of small columns aren't arguments of the script, but set in one transaction with it, and either all
        attempts are committed or none. Returns the final replies, which are at least 0. Raises TooLate for an attempt
        that came too late WRITES times.
        """
        results = [0] * len(attempts)
        left = list(range(len(attempts)))
        for _ in range(WRITES):
            large = [attempts[index].attempt for index in left if attempts[index].attempt.large_bytes]
            nbytes = sum(attempt.large_bytes for attempt in large)
            milliseconds = payload_transfer.patience(nbytes, self.orphan_seconds)
            before: list[Command] = []
            lasting = True
            if nbytes > payload_transfer.BYTES_TOGETHER or any(attempt.on_nodes for attempt in large):
                wanted, lasting = yield from self._write(attempts, left, milliseconds)
                if set_values and len(wanted) < len(left):
                    lasting = False  # without one, all are written again
                else:
                    left = wanted
            elif large:
                # Slices of refused attempts are written in vain, and expire.
                registration = self._registration([attempts[index] for index in left], milliseconds)
                before = [script_call("register", self.prefix, *registration)]
                before += payload_transfer.writes((one for attempt in large for one in attempt.slices()), milliseconds)
            replies = dict.fromkeys(left, -1)
            if left and lasting:
                set_beside = (attempts[index].attempt for index in (left if set_values else ()))
                values = [part for one in set_beside for part in (one.shared_key, one.shared)]
                with suppress(TooLate):
                    told = arguments(left)
                    reply = yield from run_script(script, self.prefix, *told, before=before, values=values)
                    replies = dict(zip(left, reply if isinstance(reply, list) else [reply] * len(left), strict=True))
            left = [index for index, reply in replies.items() if reply == -1]
            results = [max(0, replies.get(index, result)) for index, result in enumerate(results)]
            if not left:
                return results
            for index, name in zip(left, new_names(attempts[index].group_id for index in left), strict=True):
                attempts[index].attempt.rename(name)
        late = attempts[left[0]]
        raise TooLate(
            f"group {late.group_id}: what {late.stage!r} writes came too late {WRITES} times: "
            f"{late.attempt.large_bytes} bytes took longer than {milliseconds / 1000:.0f} s"
        )

    def _write(
        self, attempts: Sequence[GroupAttempt], indices: Sequence[int], milliseconds: int
    ) -> RedisOperation[tuple[list[int], bool]]:
        """Register attempts and write their large payloads. Makes payloads on data nodes permanent.

        Returns the indices of the attempts that can still be committed, and True if all their payloads are complete.
        """
        left = yield from self._wanted(attempts, indices, milliseconds)
        yield from payload_transfer.write([attempts[index].attempt for index in left], milliseconds)
        placed = [index for index in left if attempts[index].attempt.on_nodes]
        # Register them again: since the first time, a sweep may have freed slices that were written before it, but not
        # those written after it. So every permanent payload is registered, garbage, or pointed to.
        wanted = yield from self._wanted(attempts, placed, milliseconds)
        pointers = [attempts[index].attempt.pointer for index in wanted]
        places = [place for pointer in pointers for place in all_places(self.prefix, pointer)]
        left = [index for index in left if index in wanted or index not in placed]
        return left, not (yield from payload_transfer.keep(places))

    def _wanted(
        self, attempts: Sequence[GroupAttempt], indices: Sequence[int], milliseconds: int
    ) -> RedisOperation[list[int]]:
        """Register attempts. Returns the indices of those that can still be committed."""
        refused = yield from self._register([attempts[index] for index in indices], milliseconds)
        return [index for index in indices if attempts[index].attempt.pointer not in refused]

    def _register(self, attempts: Sequence[GroupAttempt], milliseconds: int) -> RedisOperation[set[str]]:
        """Register attempts whose large payloads take at most `milliseconds` to write.

        Returns the pointers of the attempts that can't be committed any more: their payloads need not be written.
        """
        if not attempts:
            return set()
        refused = yield from run_script("register", self.prefix, *self._registration(attempts, milliseconds))
        return {pointer.decode() for pointer in refused}

    @staticmethod
    def _registration(attempts: Sequence[GroupAttempt], milliseconds: int) -> list[Any]:
        """Return the arguments with which the script `register` registers those attempts that have large payloads."""
        large = (one for one in attempts if one.attempt.large_bytes)
        return [milliseconds, *(part for one in large for part in (one.group_id, one.stage, one.attempt.pointer))]
