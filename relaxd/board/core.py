"""Base of the board's three sides: the connection, the run's keys, its stages."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import redis

from relaxd.board.connection import RedisConnection
from relaxd.board.errors import BoardError, ColumnsTooLarge, RunMissing, TooLate
from relaxd.board.payloads import transfer
from relaxd.board.payloads.attempt import Attempt, all_places, new_names
from relaxd.board.payloads.encoding import decode_columns
from relaxd.board.payloads.nodes import PayloadNodes
from relaxd.board.stages import PUBLISH, Stage, producers
from relaxd.board.types import Column, Counts, DroppedGroup, HeldGroup, QueueDepth
from relaxd.config import BoardConfig
from relaxd.redis_client import COORDINATOR, key_prefix, with_access_of

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN_ID_RULE = "must be 1 to 64 letters, digits, dots, dashes and underscores, the first one a letter or digit"
RESERVED_RUN_ID = COORDINATOR
"""Keys start with relaxd:{RUN_ID}: under this name are the coordinator's own."""
WORKERS = "workers"
WRITES = 3
"""Attempts to write large payloads before their commit comes too late."""


class GroupAttempt(NamedTuple):
    """A group's columns that a stage, or "publish", writes."""

    group_id: str
    stage: str
    attempt: Attempt


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors of parsing `what` into BoardError."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(what, error) from error


def damaged(what: str, error: Exception) -> BoardError:
    """Return the error for something that Redis has and that can't be parsed."""
    return BoardError(f"{what} is damaged in Redis: {error!r}")


class BoardCore:
    """The operations that every side of a run's board has. Thread-safe."""

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
        self.run_id = run_id
        self.prefix = key_prefix(run_id)
        self.stages = tuple(stages)
        self.limits = limits
        self.orphan_seconds = orphan_seconds
        connect = partial(RedisConnection, tag=run_id, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds)
        self._connect_node = lambda url: connect(with_access_of(url, redis_url))
        self._connection = connect(redis_url)
        self._nodes = PayloadNodes(self._connection, limits.data_urls, self._connect_node)
        self._by_name = {stage.name: stage for stage in self.stages}
        self._producers = producers(self.stages)
        self._routes = json.dumps([[stage.name, self._writers(stage)] for stage in self.stages])

    def counts(self) -> Counts:
        """Read the terms of the conservation law, in one transaction. Raises RunMissing."""
        names = ("published", "trained", "dropped", "last_step", "consecutive_drops", "consecutive_filtered")

        def commands(pipe: redis.client.Pipeline) -> None:
            pipe.hmget(f"{self.prefix}state", names)
            pipe.scard(f"{self.prefix}open")
            pipe.hgetall(f"{self.prefix}drops")

        state, open_groups, reasons = self._connection.pipeline(commands, atomic=True)
        if state[0] is None:
            raise RunMissing(f"run {self.run_id} is not on the board")
        values = {name: int(value) for name, value in zip(names, state, strict=True)}
        by_reason = {reason.decode(): int(count) for reason, count in reasons.items()}
        return Counts(open=open_groups, dropped_by_reason=by_reason, **values)

    def open_groups(self) -> list[str]:
        """Return the ids of the open groups, sorted."""
        members = self._connection.run(lambda client: client.smembers(f"{self.prefix}open"))
        return sorted(member.decode() for member in members)

    def dropped(self, limit: int = 100) -> list[DroppedGroup]:
        """Return records of dropped groups, newest first; Redis keeps the last few hundred. Raises ColumnError."""
        entries = self._connection.run(lambda client: client.xrevrange(f"{self.prefix}dropped", count=limit))
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

    def queues(self) -> list[QueueDepth]:
        """Count the groups that wait for each stage and are held in it, in the stages' order. Raises RunMissing."""

        def commands(pipe: redis.client.Pipeline) -> None:
            for stage in self.stages:
                pipe.xlen(self._stream(stage.name))
                pipe.xpending(self._stream(stage.name), WORKERS)

        replies = self._connection.pipeline(commands, atomic=True)
        depths = []
        for stage, length, pending in zip(self.stages, replies[::2], replies[1::2], strict=True):
            depths.append(QueueDepth(stage.name, waiting=length - pending["pending"], held=pending["pending"]))
        return depths

    def oldest_held(self) -> dict[str, HeldGroup]:
        """Return for each stage that holds groups the one that was offered to it first. Raises RunMissing."""

        def pending(pipe: redis.client.Pipeline) -> None:
            for stage in self.stages:
                pipe.xpending_range(self._stream(stage.name), WORKERS, min="-", max="+", count=1)

        oldest = {
            stage.name: found[0]
            for stage, found in zip(self.stages, self._connection.pipeline(pending, atomic=True), strict=True)
            if found
        }

        def entries(pipe: redis.client.Pipeline) -> None:
            for stage, one in oldest.items():
                pipe.xrange(self._stream(stage), one["message_id"], one["message_id"])

        found = self._connection.pipeline(entries, atomic=True) if oldest else []
        return {
            stage: HeldGroup(
                group_id=entry[0][1].get(b"group", b"?").decode(),
                holder=one["consumer"].decode(),
                enqueued_at=int(one["message_id"].split(b"-")[0]) / 1000,
                idle_seconds=one["time_since_delivered"] / 1000,
                deliveries=one["times_delivered"] + int(entry[0][1].get(b"attempts", 0)),
            )
            for (stage, one), entry in zip(oldest.items(), found, strict=True)
            if entry  # else it was committed meanwhile
        }

    def needs(self, stage: str) -> tuple[str, ...]:
        """Return the columns that a stage of the run needs."""
        return self._by_name[stage].needs

    def writes(self, stage: str) -> tuple[str, ...]:
        """Return the columns that a stage of the run writes."""
        return self._by_name[stage].writes

    def client_attributes(self, consumer: str) -> dict[str, str]:
        """Return the attributes of a consumer in its spans."""
        names = {"messaging.consumer.group.name": WORKERS, "messaging.client.id": consumer}
        return {"relaxd.run_id": self.run_id, **names}

    def close(self) -> None:
        """Close the connections to Redis."""
        self._nodes.close()

    def _attempt(self, name: str, columns: Mapping[str, Column]) -> Attempt:
        """Encode columns under a new name. Raises ColumnError."""
        large = self.limits.large_column_bytes
        return Attempt(self.prefix, name, columns, nodes=len(self._nodes.data), large_bytes=large)

    def _stream(self, stage: str) -> str:
        if stage not in self._by_name:
            raise ValueError(f"stage {stage!r} is not in run {self.run_id}, which has {', '.join(self._by_name)}")
        return f"{self.prefix}stage:{stage}"

    def _writers(self, stage: Stage) -> list[str]:
        """Return the writers of the columns that a stage needs."""
        return sorted({self._producers.get(column, PUBLISH) for column in stage.needs} or {PUBLISH})

    def _state(self, field: str) -> bytes:
        value: bytes | None = self._connection.run(lambda client: client.hget(f"{self.prefix}state", field))
        if value is None:
            raise RunMissing(f"run {self.run_id} is not on the board")
        return value

    def _check_size(self, group_id: str, what: str, attempt: Attempt) -> None:
        """Raise ColumnsTooLarge if the columns exceed board.max_group_bytes."""
        if attempt.nbytes > self.limits.max_group_bytes:
            raise ColumnsTooLarge(
                f"group {group_id}: {what} takes {attempt.nbytes} bytes; board.max_group_bytes allows "
                f"{self.limits.max_group_bytes}"
            )

    def _commit_attempts(
        self, attempts: Sequence[GroupAttempt], script: str, arguments: Callable[[list[int]], Sequence[Any]]
    ) -> list[int]:
        """Write large payloads and run the script that points to them: in one round trip, if they are few bytes.

        `arguments` gets the indices of the attempts to commit, and returns the script's arguments. The script returns
        one reply for all attempts or a list with one for each: 1 or more (committed), 0 (nobody wants it) or -1 (it
        came too late, and is written again under another name; TOOLATE means that all are). Returns these replies,
        without those below 0. Raises TooLate for an attempt that came too late again and again.
        """
        results = [0] * len(attempts)
        left = list(range(len(attempts)))
        for _ in range(WRITES):
            large = [attempts[index].attempt for index in left if attempts[index].attempt.large_bytes]
            nbytes = sum(attempt.large_bytes for attempt in large)
            milliseconds = transfer.patience(nbytes, self.orphan_seconds)
            before: list[tuple[Any, ...]] = []
            lasting = True
            if nbytes > transfer.BYTES_TOGETHER or any(attempt.on_nodes for attempt in large):
                left, lasting = self._write(attempts, left, milliseconds)
            elif large:
                # Of those that are refused the slices are written in vain, and expire.
                registration = self._registration([attempts[index] for index in left], milliseconds)
                before = [self._connection.call("register", self.prefix, *registration)]
                before += transfer.writes((one for attempt in large for one in attempt.slices()), milliseconds)
            replies = dict.fromkeys(left, -1)
            if left and lasting:
                with suppress(TooLate):
                    reply = self._connection.script(script, self.prefix, *arguments(left), before=before)
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
    ) -> tuple[list[int], bool]:
        """Register attempts and write their large payloads; those on data nodes last from then on.

        Returns the indices of those that are still wanted, and whether every payload was made to last.
        """
        left = self._wanted(attempts, indices, milliseconds)
        transfer.write(self._nodes, [attempts[index].attempt for index in left], milliseconds)
        placed = [index for index in left if attempts[index].attempt.on_nodes]
        # They are registered a second time: since the first one, a sweep may have freed what was written before it, but
        # not what was written after it. So what lasts is registered, garbage, or pointed to.
        wanted = self._wanted(attempts, placed, milliseconds)
        pointers = [attempts[index].attempt.pointer for index in wanted]
        places = [place for pointer in pointers for place in all_places(self.prefix, pointer)]
        left = [index for index in left if index in wanted or index not in placed]
        return left, not transfer.keep(self._nodes, places)

    def _wanted(self, attempts: Sequence[GroupAttempt], indices: Sequence[int], milliseconds: int) -> list[int]:
        """Register attempts; returns the indices of those that somebody wants."""
        refused = self._register([attempts[index] for index in indices], milliseconds)
        return [index for index in indices if attempts[index].attempt.pointer not in refused]

    def _register(self, attempts: Sequence[GroupAttempt], milliseconds: int) -> set[str]:
        """Register attempts whose large payloads take at most `milliseconds` to write.

        Returns the pointers of those that nobody wants any more, whose payloads need not be written.
        """
        if not attempts:
            return set()
        refused = self._connection.script("register", self.prefix, *self._registration(attempts, milliseconds))
        return {pointer.decode() for pointer in refused}

    @staticmethod
    def _registration(attempts: Sequence[GroupAttempt], milliseconds: int) -> list[Any]:
        """Return the arguments of the script that registers the attempts with large payloads."""
        large = (one for one in attempts if one.attempt.large_bytes)
        return [milliseconds, *(part for one in large for part in (one.group_id, one.stage, one.attempt.pointer))]
