"""The log of scale requests, with a copy in Redis."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from relaxd.rpc.errors import FailedPrecondition, NotFound
from services.coordinator.fleet.changes import Signal
from services.coordinator.state.retry import RedisRetry
from services.coordinator.state.scale_records import ScaleRecord
from services.coordinator.state.store import Store

MAX_REQUESTS = 100
"""Requests that are kept."""


class ScaleLog:
    """The latest scale requests, oldest first. Every change is in Redis before it is visible here."""

    def __init__(self, store: Store, changed: Signal) -> None:
        """`changed` is fired after each change of a request in progress."""
        self._store = store
        self._changed = changed
        self._records: dict[str, ScaleRecord] = {}
        self._saving = asyncio.Lock()

    async def load(self) -> None:
        """Load the requests of earlier coordinators."""
        records = await asyncio.to_thread(self._store.scaling)
        self._records = {record.request_id: record for record in records}

    def in_progress(self) -> ScaleRecord | None:
        """Return the request that has not ended; there is at most one."""
        return next((record for record in self._records.values() if not record.state.ended), None)

    def all(self) -> list[ScaleRecord]:
        """Return the requests, newest first."""
        return list(reversed(self._records.values()))

    def find(self, request_id: str) -> ScaleRecord | None:
        """Return a request by id."""
        return self._records.get(request_id)

    def get(self, request_id: str) -> ScaleRecord:
        """Return a request; without an id, the newest. Raises NotFound."""
        if not request_id and not self._records:
            raise NotFound("there is no scale request yet")
        record = self._records.get(request_id or next(reversed(self._records), ""))
        if record is None:
            raise NotFound(f"there is no scale request {request_id!r}")
        return record

    async def add(self, record: ScaleRecord) -> None:
        """Add a request and drop the oldest ones beyond MAX_REQUESTS. Raises StoreUnavailable."""
        forget = list(self._records)[: len(self._records) + 1 - MAX_REQUESTS]
        async with self._saving:
            await self._write(record, forget)

    async def cancel(self, request_id: str) -> ScaleRecord:
        """Cancel a request; without an id, the one in progress.

        Raises NotFound; FailedPrecondition: nothing can be rolled back; StoreUnavailable.
        """
        async with self._saving:
            current = self.in_progress()
            if not request_id and current is None:
                raise FailedPrecondition("no scale request is in progress")
            record = self.get(request_id or (current.request_id if current else ""))
            if record.cancelled:
                return record
            if not any(replica.state.can_go_back for replica in record.scaled):
                raise FailedPrecondition(
                    f"scale request {record.request_id!r} is {record.state.lower()}: there is nothing left to roll back"
                )
            record = record.model_copy(update={"cancelled": True, "reason": "cancelled"})
            await self._write(record)
        self._changed.fire()
        return record

    async def update_replica(
        self, request_id: str, launch_id: str, changes: dict[str, Any], *, unless_cancelled: bool
    ) -> bool:
        """Change one replica of a request as soon as Redis is available.

        Returns False without a change if the request is cancelled and `unless_cancelled` is set.
        """
        async with self._saving:
            record = self._records[request_id]
            if unless_cancelled and record.cancelled:
                return False
            scaled = tuple(
                replica.model_copy(update=changes) if replica.launch_id == launch_id else replica
                for replica in record.scaled
            )
            record = record.model_copy(update={"scaled": scaled, "update_time": datetime.now(UTC)})
            await RedisRetry(f"scale request {request_id}").call(self._write, record)
        self._changed.fire()
        return True

    async def _write(self, record: ScaleRecord, forget: Sequence[str] = ()) -> None:
        """Save a record, in Redis first. Hold `_saving`. Raises StoreUnavailable."""
        await asyncio.to_thread(self._store.save_scaling, record, forget)
        self._records[record.request_id] = record
        for request_id in forget:
            del self._records[request_id]
