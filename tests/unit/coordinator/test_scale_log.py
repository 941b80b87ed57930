"""Records of scale requests, and their log in Redis when an answer was lost."""

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from relaxd.v1 import scaling_pb2
from services.coordinator.fleet.registry import Signal
from services.coordinator.scaling.scale_log import ScaleLog, scale_message
from services.coordinator.state import retries
from services.coordinator.state.records import Direction, ScaledReplica, ScaleRecord, ScaleSpec, ScaleState
from services.coordinator.state.store import AsyncStore, Store, StoreUnavailable
from tests.kit.cases import each


def record(direction: str, states: str) -> ScaleRecord:
    spec = ScaleSpec(direction=Direction(direction), role="rollout", replicas=3, seconds=1)
    scaled = tuple(
        ScaledReplica(launch_id=f"r-{number}", state=ScaleState(state)) for number, state in enumerate(states.split())
    )
    return ScaleRecord(request_id="r", spec=spec, scaled=scaled, deadline=datetime.now(UTC))


@each(
    ("direction", "replicas", "expected"),
    [
        ("OUT", "", "ACTIVE"),
        ("IN", "", "DONE"),
        ("OUT", "PENDING ACTIVE", "PENDING"),
        ("OUT", "SYNCING CREATING ACTIVE", "CREATING"),
        ("OUT", "REMOVING SYNCING", "SYNCING"),
        ("OUT", "ACTIVE REMOVING", "REMOVING"),
        ("OUT", "ACTIVE ACTIVE", "ACTIVE"),
        ("OUT", "ACTIVE FAILED", "PARTIAL"),
        ("OUT", "FAILED FAILED", "FAILED"),
        ("OUT", "ACTIVE CANCELLED FAILED", "CANCELLED"),
        ("IN", "DRAINING DONE", "DRAINING"),
        ("IN", "REMOVING DRAINING", "DRAINING"),
        ("IN", "DONE DONE", "DONE"),
        ("IN", "DONE FAILED", "PARTIAL"),
        ("IN", "DONE CANCELLED", "CANCELLED"),
        ("IN", "FAILED", "FAILED"),
    ],
)
def test_the_state_of_a_request(direction: str, replicas: str, expected: str) -> None:
    assert record(direction, replicas).state == ScaleState(expected)
    assert scale_message(record(direction, replicas)).state == scaling_pb2.ScaleState.Value(f"SCALE_STATE_{expected}")


@pytest.mark.parametrize(
    ("replicas", "after", "state"),
    [
        ("ACTIVE CREATING", "ACTIVE CREATING", "CREATING"),
        ("ACTIVE FAILED SYNCING", "DRAINING FAILED SYNCING", "SYNCING"),
        ("CANCELLED FAILED CANCELLED", "CANCELLED FAILED CANCELLED", "FAILED"),
    ],
)
def test_rollback_all_takes_the_active_replicas_back_after_a_failure(replicas: str, after: str, state: str) -> None:
    before = record("OUT", replicas)
    before = before.model_copy(update={"spec": before.spec.model_copy(update={"rollback_all": True})})
    back = before.after_failures()
    assert ([one.state for one in back.scaled], back.state) == (after.split(), state)
    assert back.rolled_back == ("FAILED" in replicas)
    assert back.after_failures() == back
    kept = record("OUT", replicas)
    assert kept.after_failures() is kept
    cancelled = before.model_copy(update={"cancelled": True})
    assert cancelled.after_failures() is cancelled


def test_the_names_are_those_of_the_proto() -> None:
    assert {f"SCALE_STATE_{state}" for state in ScaleState} | {"SCALE_STATE_UNSPECIFIED"} == set(
        scaling_pb2.ScaleState.keys()
    )


def test_a_record_survives_redis() -> None:
    before = record("OUT", "ACTIVE FAILED")
    assert ScaleRecord.model_validate_json(before.model_dump_json()) == before


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
