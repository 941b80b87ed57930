"""Scale requests in memory and in a real Redis."""

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from services.coordinator.fleet.changes import Signal
from services.coordinator.scaling.scale_log import ScaleLog
from services.coordinator.state import retries
from services.coordinator.state.records import Direction, ScaledReplica, ScaleRecord, ScaleSpec
from services.coordinator.state.store import AsyncStore, Store, StoreUnavailable


class LossyStore(AsyncStore):
    """Redis does what it is told, but its first answer is lost."""

    lost = False

    async def save_scaling(self, record: ScaleRecord, forget: Sequence[str] = ()) -> None:
        await super().save_scaling(record, forget)
        if not self.lost:
            self.lost = True
            raise StoreUnavailable("Redis doesn't answer")


async def test_a_request_whose_answer_was_lost_is_not_refused(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    store = LossyStore(Store(redis_url))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await store.take_over()
        log = ScaleLog(store, Signal())
        spec = ScaleSpec(direction=Direction.OUT, role="rollout", replicas=1, seconds=60.0)
        record = ScaleRecord(request_id="r", spec=spec, scaled=(), deadline=datetime.now(UTC))
        await log.add(record)
        assert store.lost
        assert await store.scaling() == log.all() == [record]


async def test_a_cancellation_whose_answer_was_lost_is_repeated(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    store = LossyStore(Store(redis_url))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await store.take_over()
        log = ScaleLog(store, Signal())
        spec = ScaleSpec(direction=Direction.OUT, role="rollout", replicas=1, seconds=60.0)
        scaled = (ScaledReplica(launch_id="rollout-1"),)
        await log.add(ScaleRecord(request_id="r", spec=spec, scaled=scaled, deadline=datetime.now(UTC)))
        store.lost = False
        cancelled = await log.cancel("r")
        assert store.lost
        assert cancelled.cancelled
        assert await store.scaling() == log.all() == [cancelled]
