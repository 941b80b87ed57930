"""The stages' side of the board: take groups, load their columns, renew holds, commit results."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from relaxd import telemetry
from relaxd.board import payload_transfer
from relaxd.board.attempts import Place, all_places, new_names, places
from relaxd.board.column_encoding import decode_columns
from relaxd.board.group_contents import facts_json, facts_of
from relaxd.board.schema import LOSS_MASK, VERSIONS
from relaxd.board.scripts import run_script
from relaxd.board.sides.side_base import WORKERS, BoardCore, GroupAttempt, damaged
from relaxd.board.stages import PUBLISH
from relaxd.board.types import DROP_COUNTERS, BoardError, Column, ColumnError, Delivery, DropKind, DropReason, Saved
from relaxd.redis_client.operations import RedisOperation, Send, ask, operation

MAX_CLAIM_INTERVAL = 5.0
COMMIT_BYTES = 16 << 20
"""Maximum size of the columns that one commit writes for several groups, in bytes. A larger commit would delay its
first group."""

NOTHING: AbstractContextManager[None, None] = nullcontext()

logger = logging.getLogger(__name__)


class StageSide(BoardCore):
    """Operations of stages: take, hold, commit and drop groups. Every operation is idempotent."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._next_claim: dict[str, float] = {}
        self._claim_interval = min(self.limits.lease_seconds / 4, MAX_CLAIM_INTERVAL)

    @operation
    def take(self, stage: str, consumer: str, *, count: int, block_seconds: float) -> RedisOperation[list[Delivery]]:
        """Take up to `count` groups for limits.lease_seconds, waiting at most block_seconds for the first.

        Groups whose lease expired come first (checked four times a lease), then new ones. A group that was delivered
        limits.max_deliveries times without success is dropped as poison. Raises RunMissing, BoardUnavailable.
        """
        deadline, asked_at = time.monotonic() + block_seconds, time.time_ns()
        stream = self._stream(stage)
        while True:
            taken: list[Delivery] = []
            now = time.monotonic()
            if now >= self._next_claim.get(stage, 0.0):
                self._next_claim[stage] = now + self._claim_interval
                taken = yield from self._claim(stage, consumer, count)
            if len(taken) < count:
                wait = min(deadline - now, self._next_claim[stage] - now, self._redis_seconds / 2)
                block = None if taken or wait <= 0 else max(1, int(wait * 1000))
                taken += yield from self._read(stream, stage, consumer, count - len(taken), block)
            if taken:
                self._record_receive(taken, asked_at)
            if taken or time.monotonic() >= deadline:
                return taken

    @operation
    def begin(self, delivery: Delivery, version: int) -> RedisOperation[bool]:
        """Record the weight version with which generation starts (see `open_versions`); a retry overwrites it.

        Returns False if this delivery does not hold the group any more.
        """
        arguments = (delivery.group_id, delivery.stage, delivery.entry_id, delivery.consumer, delivery.attempt)
        return bool((yield from run_script("begin", self.prefix, *arguments, version)))

    @operation
    def load(
        self, deliveries: Sequence[Delivery], columns: Sequence[str]
    ) -> RedisOperation[list[dict[str, Column] | None]]:
        """Load columns of each delivery's group; None for a group that was closed meanwhile.

        An open group with a payload that is missing is dropped as "payload_lost", and its prompt retried. Arrays are
        read-only views. Raises BoardError for a column that is not written yet, ColumnError for a corrupt one.
        """
        if not deliveries:
            return []
        placed = yield from self._places(deliveries, columns)
        every = {place.keys[0]: place for group in placed if group is not None for place in group.values()}
        ids = [delivery.group_id for delivery in deliveries]
        found, is_open = yield from payload_transfer.read(every.values(), "SMISMEMBER", f"{self.prefix}open", *ids)
        payloads = {key: None if (data := found[key]) is None else decode_columns(data) for key in every}
        loaded = [None if group is None else _pick(payloads, group) for group in placed]
        lacking: list[str] = []
        for group_id, group, located, held in zip(ids, loaded, placed, is_open, strict=True):
            if group is None and located is not None and held:
                lacking += group_id, next(one.keys[0] for one in located.values() if payloads[one.keys[0]] is None)
        if lacking:
            dropped = yield from run_script("drop_lost", self.prefix, self.limits.max_retries, *lacking)
            logger.error("dropped %d groups whose payloads are gone from Redis, of %s", dropped, lacking[:10:2])
        return [group if held else None for group, held in zip(loaded, is_open, strict=True)]

    @operation
    def saved(self, delivery: Delivery) -> RedisOperation[Saved]:
        """Load the unfinished work that deliveries of this group have saved at this stage, in order.

        The work is removed once the stage has committed or the group is closed. If saved work is damaged, only its
        pointers are returned, for `forget_saved`.
        """
        saved = ("HGET", f"{self.prefix}group:{delivery.group_id}", f"saved:{delivery.stage}")
        found = yield from ask(*saved)
        pointers = found.decode() if found else ""
        try:
            placed = [all_places(self.prefix, pointer) for pointer in pointers.split()]
            every = [place for of_part in placed for place in of_part]
            payloads, still = yield from payload_transfer.read(every, *saved)
            if still != found:  # somebody committed, dropped or forgot it this moment
                return Saved()
            return Saved(pointers, tuple(_join(payloads, of_part) for of_part in placed))
        except (ColumnError, ValueError) as error:
            logger.error("the saved work of group %s is damaged: %s", delivery.group_id, error)
            return Saved(pointers)

    @operation
    def save(
        self, delivery: Delivery, columns: Mapping[str, Column], *, after: str, forgiven: bool = False
    ) -> RedisOperation[str | None]:
        """Save another part of a delivery's unfinished work, for the next delivery of the group.

        A commit of the stage or the end of the group removes the work.

        Args:
            delivery: the hold.
            columns: the new part.
            after: the pointers of the parts before, from `saved` or the last `save`.
            forgiven: the part is so large that this delivery shall not count towards limits.max_deliveries.

        Returns the pointers of all parts; None if this delivery does not hold the group any more, or others have saved
        or forgotten something. Raises ColumnError, TooLate.
        """
        attempt = self._attempt(new_names([delivery.group_id])[0], columns)
        self._check_size(delivery.group_id, f"the unfinished work of stage {delivery.stage!r}", attempt)
        hold = (delivery.group_id, delivery.stage, delivery.entry_id, delivery.consumer, delivery.attempt)

        def arguments(_: list[int]) -> list[Any]:
            return [*hold, after, attempt.pointer, attempt.shared, int(forgiven)]

        attempts = [GroupAttempt(delivery.group_id, delivery.stage, attempt)]
        done = yield from self._commit_attempts(attempts, "save", arguments)
        return f"{after} {attempt.pointer}".strip() if done == [1] else None

    @operation
    def forget_saved(self, delivery: Delivery, pointers: str) -> RedisOperation[bool]:
        """Remove the unfinished work that is saved under these pointers.

        Returns False if this delivery does not hold the group any more, or others have saved or forgotten something.
        """
        hold = (delivery.group_id, delivery.stage, delivery.entry_id, delivery.consumer, delivery.attempt)
        return bool((yield from run_script("save", self.prefix, *hold, pointers, "", "", 0)))

    @operation
    def renew(self, stage: str, consumer: str, deliveries: Sequence[Delivery]) -> RedisOperation[set[str]]:
        """Renew the leases of held groups. Returns the ids of groups still held; other consumers took the rest."""
        if not deliveries:
            return set()
        arguments = [part for d in deliveries for part in (d.group_id, d.entry_id, d.attempt)]
        held = yield from run_script("renew", self.prefix, stage, consumer, *arguments)
        return {group_id.decode() for group_id in held}

    @operation
    def nack(
        self, stage: str, consumer: str, deliveries: Sequence[Delivery], *, failed: bool = False
    ) -> RedisOperation[int]:
        """Hand groups back to their stage for immediate redelivery. Returns the number of groups that were still held.

        The deliveries count towards limits.max_deliveries only if `failed`.
        """
        if not deliveries:
            return 0
        arguments = [part for d in deliveries for part in (d.group_id, d.entry_id, d.attempt)]
        settings = (stage, consumer, int(failed), self.limits.max_deliveries)
        with self._settling("nack", deliveries):
            return int((yield from run_script("nack", self.prefix, *settings, *arguments)))

    @operation
    def redo(self, stage: str, consumer: str, deliveries: Sequence[Delivery], *, again: str) -> RedisOperation[int]:
        """Send held groups back to another stage, `again`, which writes its columns anew.

        Returns the number of groups that were still held. The holds end. The groups lose the columns of stage `again`;
        once it has committed, they are offered to this stage again. The deliveries don't count towards
        limits.max_deliveries.
        """
        if not deliveries:
            return 0
        arguments = [part for d in deliveries for part in (d.group_id, d.entry_id, d.attempt)]
        with self._settling("redo", deliveries):
            return int((yield from run_script("redo", self.prefix, stage, consumer, again, *arguments)))

    @operation
    def commit(self, items: Sequence[tuple[Delivery, Mapping[str, Column]]]) -> RedisOperation[list[bool]]:
        """Commit exactly the columns that each delivery's stage writes, and offer the groups to the next stages.

        Takes one round trip if all columns are small. Returns for each delivery True, or False if another attempt was
        first or the group is closed; both end the hold. Raises ColumnError, and ValueError for missing or unknown
        columns.
        """
        names = new_names(delivery.group_id for delivery, _ in items)
        prepared = [
            self._prepare(delivery, columns, name) for (delivery, columns), name in zip(items, names, strict=True)
        ]
        results: list[bool] = []
        with self._settling("commit", [delivery for delivery, _ in items]):
            for together in payload_transfer.gather(prepared, lambda one: one[0].attempt.nbytes, COMMIT_BYTES):
                results += yield from self._commit_together(together)
        return results

    @operation
    def drop(
        self,
        delivery: Delivery,
        *,
        reason: DropReason,
        retry: bool = False,
        counts: DropKind = "failed",
        detail: str = "",
    ) -> RedisOperation[bool]:
        """Drop the group that a delivery holds. Returns False if the group was closed, or this delivery lost its hold.

        With `retry`, the group's prompt waits to be published again, at most limits.max_retries times; if its reward
        failed, the prompt waits for `retry_unscored` instead. `counts` selects the count of consecutive drops. `detail`
        is recorded with the group, for people.
        """
        again = "unscored" if reason == DropReason.REWARD_FAILED else int(retry)
        settings = (reason, again, self.limits.max_retries, DROP_COUNTERS[counts], detail)
        hold = (delivery.stage, delivery.entry_id, delivery.consumer, delivery.attempt)
        with self._settling("drop", [delivery], reason):
            return bool((yield from run_script("drop", self.prefix, delivery.group_id, *settings, *hold)))

    def _record_receive(self, taken: Sequence[Delivery], asked_at: int) -> None:
        if telemetry.enabled():
            stage, more = taken[0].stage, self.client_attributes(taken[0].consumer)
            telemetry.record_batch("receive", "receive", stage, (one.trace for one in taken), asked_at, more)

    def _settling(
        self, name: str, deliveries: Sequence[Delivery], reason: str = ""
    ) -> AbstractContextManager[None, None]:
        """Record a span for the block, an operation that ends a stage's holds of groups."""
        if not deliveries or not telemetry.enabled():
            return NOTHING
        more = self.client_attributes(deliveries[0].consumer)
        more |= {"relaxd.reason": reason} if reason else {}
        return telemetry.BatchSpan(name, "settle", deliveries[0].stage, (one.trace for one in deliveries), more)

    def _prepare(self, delivery: Delivery, columns: Mapping[str, Column], name: str) -> tuple[GroupAttempt, list[Any]]:
        """Return an attempt to commit a stage's columns, and further arguments of the script: version, times, facts."""
        writes = self._by_name[delivery.stage].writes
        if set(columns) != set(writes):
            raise ValueError(
                f"stage {delivery.stage!r} writes columns {', '.join(sorted(writes))}; "
                f"got {', '.join(sorted(columns)) or 'none'}"
            )
        attempt = self._attempt(name, columns)
        self._check_size(delivery.group_id, f"the output of stage {delivery.stage!r}", attempt)
        versions, mask = columns.get(VERSIONS), columns.get(LOSS_MASK)
        if isinstance(versions, np.ndarray) and isinstance(mask, np.ndarray) and versions.shape == mask.shape:
            versions = versions[mask != 0]
        version = int(versions.min()) if isinstance(versions, np.ndarray) and versions.size else ""
        times = f"{delivery.enqueued_at} {delivery.worked[0]} {delivery.worked[1]}" if delivery.worked else ""
        return GroupAttempt(delivery.group_id, delivery.stage, attempt), [version, times, facts_json(facts_of(columns))]

    def _commit_together(self, prepared: Sequence[tuple[GroupAttempt, list[Any]]]) -> RedisOperation[list[bool]]:
        def arguments(indices: list[int]) -> list[Any]:
            result: list[Any] = [self._routes]
            for (group_id, stage, attempt), told in (prepared[index] for index in indices):
                result += (group_id, stage, attempt.pointer, attempt.shared, *told)
            return result

        results = yield from self._commit_attempts([one for one, _ in prepared], "commit", arguments)
        return [result == 1 for result in results]

    def _claim(self, stage: str, consumer: str, count: int) -> RedisOperation[list[Delivery]]:
        lease = max(1, int(self.limits.lease_seconds * 1000))
        # Half of this consumer's interval, so that its claim is never refused as too early if it is the only consumer.
        interval = int(self._claim_interval * 500)
        settings = (count, lease, self.limits.max_deliveries, interval)
        entries = yield from run_script("claim_expired", self.prefix, stage, consumer, *settings)
        return (yield from self._parse_entries(stage, consumer, entries))

    def _read(
        self, stream: str, stage: str, consumer: str, count: int, block: int | None
    ) -> RedisOperation[list[Delivery]]:
        """Take up to `count` groups newly offered to the stage. Waits at most `block` milliseconds; None: no wait."""
        arguments: list[Any] = ["XREADGROUP", "GROUP", WORKERS, consumer, "COUNT", count]
        if block is not None:
            arguments += ["BLOCK", block]
        reply = yield from ask(*arguments, "STREAMS", stream, ">")
        entries = [(*entry, 1) for _, of_stream in reply or () for entry in of_stream]
        return (yield from self._parse_entries(stage, consumer, entries))

    def _parse_entries(
        self, stage: str, consumer: str, entries: Sequence[tuple[Any, Any, int]]
    ) -> RedisOperation[list[Delivery]]:
        """Parse entries of a stage's stream: (id, fields, number of deliveries).

        Groups whose entry can't be parsed are dropped as "damaged"; else each replica that takes them would crash.
        """
        found, damaged = [], []
        for entry_id, fields, deliveries in entries:
            try:
                found.append(_delivery(stage, consumer, entry_id, fields, deliveries))
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                logger.error("dropping the damaged entry %s of stage %s: %r", entry_id, stage, error)
                damaged.append(entry_id)
        if damaged:
            yield from run_script("discard", self.prefix, stage, *damaged)
        return found

    def _places(
        self, deliveries: Sequence[Delivery], columns: Sequence[str]
    ) -> RedisOperation[list[dict[str, Place] | None]]:
        """Return for each group where its columns are stored; None for a group that has been closed."""
        wanted: dict[str, list[str]] = {}
        for column in columns:
            wanted.setdefault("@" + self._producers.get(column, PUBLISH), []).append(column)
        result: list[dict[str, Place] | None] = []
        every = yield from self._pointers(deliveries, list(wanted))
        for delivery, pointers in zip(deliveries, every, strict=True):
            if pointers is None:
                result.append(None)
                continue
            located: dict[str, Place] = {}
            try:
                for writer, names in wanted.items():
                    located |= places(self.prefix, pointers[writer], names)
            except ValueError as error:
                raise damaged(f"a pointer of group {delivery.group_id}", error) from error
            result.append(located)
        return result

    def _pointers(
        self, deliveries: Sequence[Delivery], writers: list[str]
    ) -> RedisOperation[list[dict[str, str] | None]]:
        """Return each group's payload pointers, by writer.

        If the delivery lacks the pointer of one of `writers`, all are read from the board; None if the group is closed.
        """
        needed = set(writers)
        incomplete = [delivery for delivery in deliveries if not needed <= delivery.pointers.keys()]
        if not incomplete:
            return [delivery.pointers for delivery in deliveries]

        keys = [f"{self.prefix}group:{delivery.group_id}" for delivery in incomplete]
        replies = yield Send([("HMGET", key, "published", *writers) for key in keys])
        looked_up: dict[str, dict[str, str] | None] = {}
        for delivery, (published, *found) in zip(incomplete, replies, strict=True):
            if published is None:
                looked_up[delivery.group_id] = None
                continue
            if None in found:
                missing = writers[found.index(None)].removeprefix("@")
                raise BoardError(f"group {delivery.group_id} has no columns of {missing!r} yet")
            looked_up[delivery.group_id] = dict(zip(writers, (f.decode() for f in found), strict=True))
        return [looked_up.get(d.group_id, d.pointers) for d in deliveries]


def _pick(payloads: Mapping[str, dict[str, Column] | None], placed: Mapping[str, Place]) -> dict[str, Column] | None:
    """Return the columns of a group that `placed` names, from loaded payloads; None if a payload is missing."""
    result: dict[str, Column] = {}
    for column, place in placed.items():
        payload = payloads[place.keys[0]]
        if payload is None:
            return None
        if column not in payload:
            raise BoardError(f"column {column!r} is not in the payload {place.keys[0]}")
        result[column] = payload[column]
    return result


def _join(payloads: Mapping[str, bytes | None], places: Sequence[Place]) -> dict[str, Column]:
    """Decode payloads and return all of their columns. Raises ColumnError if a payload is missing or corrupt."""
    columns: dict[str, Column] = {}
    for place in places:
        payload = payloads[place.keys[0]]
        if payload is None:
            raise ColumnError(f"payload {place.keys[0]} is gone from Redis")
        columns |= decode_columns(payload)
    return columns


def _delivery(stage: str, consumer: str, entry_id: bytes, flat: Sequence[bytes], deliveries: int) -> Delivery:
    """Parse a stream entry, in which field names and values alternate. Raises KeyError and others if it is damaged."""
    if len(flat) % 2:
        raise ValueError(f"{len(flat)} names and values")
    group_id, attempt = "", deliveries
    trace: dict[str, str] = {}
    pointers: dict[str, str] = {}
    words = iter(flat)
    for name in words:
        value = next(words).decode()
        if name == b"group":
            group_id = value
        elif name[:1] == b"@":
            pointers[name.decode()] = value
        elif name == b"attempts":
            attempt += int(value)
        elif name == b"trace":
            trace = dict(json.loads(value))
    if not group_id or not pointers:
        raise KeyError("@" if group_id else "group")
    id = entry_id.decode()
    return Delivery(group_id, id, stage, consumer, attempt, trace, int(id.partition("-")[0]) * 1000, pointers)
