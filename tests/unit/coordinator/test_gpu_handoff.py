"""A colocated run leaves no state behind on the replicas that it used."""

import asyncio
import contextlib
import time

import pytest

from relaxd.config import BoardConfig, DataConfig, ModelConfig, RewardConfig, RunConfig, RunSection
from relaxd.roles import REPLICA_ROLES, ROLLOUT, TRAINER
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ReplicaStatus, WeightVersion
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.fleet.run_fleet import Fleet, RunContext
from services.coordinator.state.records import WeightsRecord
from services.coordinator.state.store import AsyncStore, RunBoard, Store
from services.coordinator.weights.gpu_handoff import GpuHandoff
from services.coordinator.weights.weight_sync import WeightSync
from tests.kit.boards import STAGES
from tests.kit.waiting import eventually


async def colocated(redis_url: str) -> tuple[Registry, WeightSync, GpuHandoff, RunBoard]:
    """A colocated run with an engine that can't be reached."""
    store = AsyncStore(Store(redis_url))
    store.in_threads.take_over()
    registry = Registry(store, lease_seconds=6.0, heartbeat_seconds=1.0, gpu_lease_seconds=60.0)
    await registry.register(Registration(replica_id="rollout-0", role=ROLLOUT, address="127.0.0.1:9"))
    config = RunConfig(
        run=RunSection(steps=9, colocate=True),
        model=ModelConfig(path="none"),
        data=DataConfig(source="addition"),
        reward=RewardConfig(name="addition"),
        board=BoardConfig(max_staleness=0),
    )
    board = RunBoard(redis_url, "run", STAGES, config.board, retry_seconds=0.2)
    context = RunContext("run", config, board, store, Fleet(registry, "run", REPLICA_ROLES), Peers("", None, 1))
    sync = WeightSync(context, WeightsRecord())
    handoff = GpuHandoff(context, sync, training=lambda: True, evaluating=lambda: False)
    return registry, sync, handoff, board


async def test_engines_that_slept_serve_the_next_run(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, sync, handoff, board = await colocated(redis_url)
    engine = registry.of_role(ROLLOUT)[0]

    task = asyncio.create_task(handoff.run_forever())
    await asyncio.sleep(0)  # it begins
    engine.set_serving(serving=False)
    engine.request_gpu()
    task.cancel()  # as at the end of the run
    with contextlib.suppress(asyncio.CancelledError):
        await task

    weights = WeightVersion(term=2, version=0)
    registry.heartbeat("rollout-0", ReplicaStatus(state=REPLICA_STATE_READY, run_id="next", weights=weights))
    assert engine.version == (2, 0)
    assert engine.gpu_requested_at == 0.0

    # Turns aren't on record: only the clock makes their ids ascend.
    turn, now = sync.next_id(), time.time
    monkeypatch.setattr(time, "time", lambda: now() - 40 * 86400)
    assert sync.next_id() >= turn
    await board.close()


async def test_no_move_is_made_once_it_rests(redis_url: str) -> None:
    registry, _, handoff, board = await colocated(redis_url)
    await board.create(term=1, groups_per_step=4, steps=9)
    await registry.register(Registration(replica_id="trainer", role=TRAINER, address="127.0.0.1:9"))
    for name, awake in (("rollout-0", True), ("trainer", False)):
        status = ReplicaStatus(state=REPLICA_STATE_READY, run_id="run", awake=awake)
        registry.heartbeat(name, status)
    task = asyncio.create_task(handoff.run_forever())
    with handoff.trainer_awake():
        await eventually(lambda: handoff.last_failure, "a move that fails")
        await handoff.rest()
        handoff.last_failure = ""
        with pytest.raises(TimeoutError):  # the failed move would be repeated after 0.1 s
            await asyncio.wait_for(task, 0.5)
    assert handoff.waiting_for == ""
    await board.close()
