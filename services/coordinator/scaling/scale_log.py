"""The log of scale requests, with a copy in Redis, and its conversion to protobuf messages."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from relaxd.rpc.errors import FailedPrecondition, NotFound
from relaxd.v1 import scaling_pb2 as pb
from services.coordinator.fleet.registry import Signal
from services.coordinator.state.records import Direction, ScaledReplica, ScaleRecord, ScaleState
from services.coordinator.state.retries import RedisRetry, outlives_caller
from services.coordinator.state.store import AsyncStore

MAX_REQUESTS = 100
"""Maximum number of scale requests to keep."""


@dataclass
class _Change:
    """A change of one replica of a scale request. Changes that arrive during a write to Redis are saved together by the
    next write."""

    launch_id: str
    changes: dict[str, Any]
    unless_going_back: bool
    done: bool = False
    made: bool = False
    """True if no cancellation or rollback prevented the change."""


@dataclass(frozen=True)
class ScaleFilter:
    """Filter of scale requests. An empty field selects all requests."""

    role: str = ""
    direction: Direction | None = None
    states: frozenset[ScaleState] = frozenset()

    def selects(self, record: ScaleRecord) -> bool:
        """Return True if a scale request has this filter's role and direction and one of its states."""
        return (
            self.role in ("", record.spec.role)
            and self.direction in (None, record.spec.direction)
            and (not self.states or record.state in self.states)
        )


class ScaleLog:
    """The latest scale requests, oldest first. Every change is saved in Redis before this object shows it."""

    def __init__(self, store: AsyncStore, changed: Signal) -> None:
        """`changed` is fired after each change of a scale request in progress."""
        self._store = store
        self._changed = changed
        self._records: dict[str, ScaleRecord] = {}
        self._replicas: dict[str, dict[str, ScaledReplica]] = {}
        """The replicas of each scale request: launch id to replica, by request id."""
        self._changes: dict[str, list[_Change]] = {}
        """Changes that wait to be saved, by request id."""
        self._saving = asyncio.Lock()

    async def load(self) -> None:
        """Load the scale requests of earlier coordinators from Redis."""
        records = await self._store.scaling()
        for record in records:
            self._keep(record)

    def in_progress(self) -> list[ScaleRecord]:
        """Return the scale requests in progress, oldest first; at most one per role."""
        return [record for record in self._records.values() if not record.state.ended]

    def all(self) -> list[ScaleRecord]:
        """Return all scale requests, newest first."""
        return list(reversed(self._records.values()))

    def select(self, chosen: ScaleFilter) -> list[ScaleRecord]:
        """Return the scale requests that a filter selects, newest first."""
        return [record for record in self.all() if chosen.selects(record)]

    def find(self, request_id: str) -> ScaleRecord | None:
        """Return the scale request with this id; None if there is none."""
        return self._records.get(request_id)

    def replica(self, request_id: str, launch_id: str) -> ScaledReplica:
        """Return one replica of a scale request, by launch id."""
        return self._replicas[request_id][launch_id]

    def get(self, request_id: str) -> ScaleRecord:
        """Return a scale request; without an id, the newest. Raises NotFound."""
        if not request_id and not self._records:
            raise NotFound("there is no scale request yet")
        record = self._records.get(request_id or next(reversed(self._records), ""))
        if record is None:
            raise NotFound(f"there is no scale request {request_id!r}")
        return record

    async def add(self, record: ScaleRecord) -> None:
        """Add a scale request as soon as Redis is available, and drop the oldest ended ones beyond MAX_REQUESTS.

        The write is repeated until Redis answers: Redis may have the request although its answer was lost, and a
        restart would then execute it.
        """
        surplus = max(0, len(self._records) + 1 - MAX_REQUESTS)
        forget = [old.request_id for old in self._records.values() if old.state.ended][:surplus]
        async with self._saving:
            await RedisRetry(f"scale request {record.request_id}").call(self._write, record, forget)

    @staticmethod
    def check_cancellable(record: ScaleRecord) -> None:
        """Raise FailedPrecondition if cancelling the scale request would change nothing."""
        if record.rolled_back or not any(replica.state.can_go_back for replica in record.scaled):
            raise FailedPrecondition(
                f"scale request {record.request_id!r} is {record.state.lower()}: there is nothing left to roll back"
            )

    @outlives_caller("the end of a scale request")
    async def cancel(self, request_id: str) -> ScaleRecord:
        """Cancel a scale request (without an id: the request in progress) and roll its replicas back, once Redis
        answers.

        The write is repeated, as in `add`: Redis may have the cancellation although its answer was lost. Raises
        NotFound; FailedPrecondition: nothing can be rolled back, or several are in progress.
        """
        async with self._saving:
            if not request_id:
                current = [record.request_id for record in self.in_progress()]
                if not current:
                    raise FailedPrecondition("no scale request is in progress")
                if len(current) > 1:
                    raise FailedPrecondition(f"scale requests {', '.join(current)} are in progress: name one")
                request_id = current[0]
            record = self.get(request_id)
            if record.cancelled:
                return record
            self.check_cancellable(record)
            record = record.model_copy(update={"cancelled": True, "reason": "cancelled"})
            await RedisRetry(f"scale request {record.request_id}").call(self._write, record)
        self._changed.fire()
        return record

    async def update_replica(
        self, request_id: str, launch_id: str, changes: dict[str, Any], *, unless_going_back: bool
    ) -> bool:
        """Change one replica of a scale request as soon as Redis is available.

        Returns False without a change if the request is cancelled or rolled back and `unless_going_back` is set.
        """
        change = _Change(launch_id, changes, unless_going_back)
        self._changes.setdefault(request_id, []).append(change)
        async with self._saving:
            if not change.done:  # else it was saved together with another
                await self._save_changes(request_id)
        return change.made

    async def _save_changes(self, request_id: str) -> None:
        """Save all waiting changes of a scale request. The caller must hold the lock `_saving`."""
        together = self._changes.pop(request_id)
        try:
            record, replicas = self._records[request_id], dict(self._replicas[request_id])
            for change in together:
                change.made = not (change.unless_going_back and record.going_back)
                if change.made:
                    replicas[change.launch_id] = replicas[change.launch_id].model_copy(update=change.changes)
            if any(change.made for change in together):
                update = {"scaled": tuple(replicas.values()), "update_time": datetime.now(UTC)}
                changed = record.model_copy(update=update).after_failures()
                await RedisRetry(f"scale request {request_id}").call(self._write, changed)
        except BaseException:
            self._changes[request_id] = [*together, *self._changes.get(request_id, ())]
            raise
        for change in together:
            change.done = True
        self._changed.fire()

    async def _write(self, record: ScaleRecord, forget: Sequence[str] = ()) -> None:
        """Write a scale request to Redis, then keep it in memory. The caller must hold the lock `_saving`. Raises
        StoreUnavailable."""
        await self._store.save_scaling(record, forget)
        self._keep(record)
        for request_id in forget:
            del self._records[request_id], self._replicas[request_id]

    def _keep(self, record: ScaleRecord) -> None:
        self._records[record.request_id] = record
        self._replicas[record.request_id] = {replica.launch_id: replica for replica in record.scaled}


def scale_message(record: ScaleRecord) -> pb.ScaleRequest:
    """Convert a scale request to its protobuf message."""
    message = pb.ScaleRequest(
        request_id=record.request_id,
        direction=pb.ScaleDirection.Value(f"SCALE_DIRECTION_{record.spec.direction.value}"),
        role=record.spec.role,
        replicas=record.spec.replicas,
        state=pb.ScaleState.Value(f"SCALE_STATE_{record.state.value}"),
        reason=record.reason or "; ".join(f"{r.launch_id}: {r.detail}" for r in record.scaled if r.detail),
        cancelled=record.cancelled,
        rollback_all=record.spec.rollback_all,
        scaled=[
            pb.ScaledReplica(
                launch_id=replica.launch_id,
                replica_id=replica.replica_id,
                address=replica.address,
                state=pb.ScaleState.Value(f"SCALE_STATE_{replica.state.value}"),
                detail=replica.detail,
                gpu_uuids=replica.gpu_uuids,
                sglang_url=replica.sglang_url,
            )
            for replica in record.scaled
        ],
    )
    message.create_time.FromDatetime(record.create_time)
    message.update_time.FromDatetime(record.update_time)
    message.deadline.FromDatetime(record.deadline)
    return message
