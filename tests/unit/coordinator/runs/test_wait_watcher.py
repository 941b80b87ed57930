"""The watcher of waits, on a real board: what it sees, since when, and what it says while Redis is away."""

import logging
import time
from typing import Any

import pytest

from relaxd.config import BoardConfig, DataConfig, ModelConfig, RewardConfig, RunConfig, RunSection, TrainerConfig
from relaxd.roles import CRITIC, REWARD, ROLLOUT
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_IDLE,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    REPLICA_WAIT_GPUS,
    ReplicaStatus,
)
from relaxd.waiting import waiting
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.fleet.run_fleet import Fleet, RunContext
from services.coordinator.runs.wait_watcher import WaitWatcher
from services.coordinator.state.store import AsyncStore, RunBoard, Store
from tests.kit.boards import STAGES, advance, group, take
from tests.kit.redis.redis_server import RedisServer

RUN = {"going_since": 0.0, "redis": "", "announced": 0}


class World:
    """A run with a board and a registry, and what it says of itself."""

    def __init__(self, url: str, roles: tuple[str, ...] = (ROLLOUT, REWARD)) -> None:
        config = RunConfig(
            run=RunSection(steps=9),
            model=ModelConfig(path="none"),
            data=DataConfig(source="addition"),
            reward=RewardConfig(name="addition"),
            trainer=TrainerConfig(groups_per_step=2),
        )
        store = AsyncStore(Store(url))
        store.in_threads.take_over()
        self.registry = Registry(store, lease_seconds=6.0, heartbeat_seconds=1.0, gpu_lease_seconds=60.0)
        run_board = RunBoard(url, "run", STAGES, BoardConfig(), retry_seconds=0.2)
        self.board = run_board.in_threads
        self.board.create(term=1, groups_per_step=2, steps=9)
        self.board.set_gate(term=1, oldest_version=0, open=True)
        fleet = Fleet(self.registry, "run", roles)
        context = RunContext("run", config, run_board, store, fleet, Peers("", None, 1))
        self.run: dict[str, Any] = {**RUN, "going_since": time.time()}
        self.watcher = WaitWatcher(context, lambda: dict(self.run))

    async def replica(
        self, name: str, role: str, state: int = REPLICA_STATE_READY, detail: str = "", wait: int = 0
    ) -> None:
        await self.registry.register(Registration(replica_id=name, role=role, address="127.0.0.1:9"))
        self.registry.heartbeat(name, ReplicaStatus(state=state, run_id="run", detail=detail, wait=wait))

    async def look(self) -> pb.Run:
        await self.watcher.look()
        run = pb.Run()
        self.watcher.describe(run)
        return run


async def test_it_sees_replicas_groups_and_steps(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World(redis_url)
    assert (await world.look()).waiting_for == "no rollout or reward replica is registered, for 0 s"
    await world.replica("rollout-0", ROLLOUT, REPLICA_STATE_STARTING, "loading the model")
    await world.replica("reward-0", REWARD)
    first = await world.look()
    assert first.waiting_for.startswith("rollout-0 is starting: loading the model")
    assert (await world.look()).wait.start_time == first.wait.start_time  # it is the same wait
    assert "rollout-0: starting, loading the model" in first.wait.evidence

    world.registry.heartbeat("rollout-0", ReplicaStatus(state=REPLICA_STATE_READY, run_id="run"))
    world.board.publish(term=1, groups=[group("a"), group("b"), group("c")])
    take(world.board, "rollout", "rollout-0", count=1)
    calm = await world.look()
    assert (calm.waiting_for, calm.wait.kind) == ("", pb.WAIT_KIND_UNSPECIFIED)  # training has only begun
    assert any(line.startswith("rollout: 2 groups wait, 1 are held; a has been there") for line in calm.wait.evidence)
    assert not calm.HasField("remaining_seconds")

    world.run["going_since"] -= 40
    with caplog.at_level(logging.INFO):
        late = await world.look()
        assert late.wait.kind == pb.WAIT_KIND_STAGE
        assert late.waiting_for.startswith("step 1 lacks 2 of its 2 groups; rollout is the slow stage: 2 groups wait")
        await world.look()
        assert caplog.text.count("rollout is the slow stage") == 1

        advance(world.board, ["rollout", "reward", "critic", "advantage"])
        term = world.board.new_trainer_term()
        groups = [delivery.group_id for delivery in take(world.board, "train")]
        world.board.commit_step(term=term, step=1, plan={"groups": groups}, metrics={"step_seconds": 2.5})
        ended = await world.look()
        assert "run run: goes on" in caplog.text
    assert (ended.waiting_for, ended.HasField("remaining_seconds")) == ("", False)  # the first step is slow
    assert "step 1 of 9 ended 0 s ago; the last steps usually took 2.5 s" in ended.wait.evidence
    for step, seconds in ((2, 0.5), (3, 1.0)):
        world.board.set_gate(term=1, oldest_version=step - 1, open=True)
        world.board.publish(term=1, groups=[group(f"{step}-{number}") for number in range(2)])
        advance(world.board, ["rollout", "reward", "critic", "advantage"])
        groups = [delivery.group_id for delivery in take(world.board, "train", count=2)]
        world.board.commit_step(term=term, step=step, plan={"groups": groups}, metrics={"step_seconds": seconds})
    assert (await world.look()).remaining_seconds == 6 * 1.0


async def test_a_late_step_is_late_although_the_clock_was_set_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(redis_url)
    await world.replica("rollout-0", ROLLOUT)
    await world.replica("reward-0", REWARD)
    world.board.publish(term=1, groups=[group("a"), group("b"), group("c"), group("d")])
    advance(world.board, ["rollout", "reward", "critic", "advantage"])
    term = world.board.new_trainer_term()
    groups = [delivery.group_id for delivery in take(world.board, "train", count=2)]
    world.board.commit_step(term=term, step=1, plan={"groups": groups}, metrics={"step_seconds": 2.5})
    assert (await world.look()).waiting_for == ""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 40 * 86400)
    world.run["going_since"] = time.time() - 60
    assert (await world.look()).waiting_for.startswith("the trainer has all 2 groups of step 2")


async def test_a_replica_in_a_state_of_another_release_is_named(redis_url: str) -> None:
    world = World(redis_url)
    await world.replica("rollout-1", ROLLOUT, 77)
    run = await world.look()
    assert "rollout-1: in a state that this release doesn't know (77)" in run.wait.evidence


async def test_the_coordinators_own_waits_are_said_while_it_stops(redis_url: str) -> None:
    world = World(redis_url)
    world.run["stopping"] = "by hand"
    with waiting("rollout-0 to get the last version", on="rollout-0"):
        run = await world.look()
    assert run.waiting_for == "it is stopping (by hand): waiting for rollout-0 to get the last version, for 0 s"
    assert (run.wait.kind, run.wait.on) == (pb.WAIT_KIND_STOPPING, "rollout-0")
    world.run |= {"stopping": "", "paused": "a look"}
    world.watcher.refresh()
    assert world.watcher.sentence.startswith("it is paused and waits for a person: a look")


async def test_a_replicas_wait_and_the_coordinators_are_told_by_their_codes(redis_url: str) -> None:
    world = World(redis_url)
    await world.replica("reward-0", REWARD)
    await world.replica("rollout-0", ROLLOUT, REPLICA_STATE_STARTING, "rollout-9 has GPU-1", REPLICA_WAIT_GPUS)
    run = await world.look()
    assert (run.wait.kind, run.wait.on) == (pb.WAIT_KIND_LEASE, "rollout-0")
    with waiting("/runs/demo to be writable", disk=True):
        run = await world.look()
    assert (run.wait.kind, run.wait.on) == (pb.WAIT_KIND_DISK, "the disk")
    assert (run.wait.current_kind, run.wait.current_on) == (pb.WAIT_KIND_DISK, "the disk")


async def test_it_speaks_while_redis_is_away(tmp_path: Any) -> None:
    server = RedisServer(tmp_path).start()
    world = World(server.url)
    world.board.publish(term=1, groups=[group("a")])
    await world.look()
    server.kill()
    run = await world.look()
    assert world.watcher.redis_is_away
    assert run.waiting_for.startswith("it waits for Redis: Redis at 127.0.0.1:")
    assert "groups: 1 published, 1 open, 0 dropped" in run.wait.evidence  # what it last said


async def test_nobody_waits_for_a_replica_that_stands_by(redis_url: str) -> None:
    world = World(redis_url, (CRITIC,))
    await world.replica("critic-1", CRITIC, REPLICA_STATE_STARTING, "loading the model")
    await world.replica("critic-2", CRITIC)
    world.registry.heartbeat("critic-2", ReplicaStatus(state=REPLICA_STATE_IDLE, detail="it stands by"))
    assert (await world.look()).waiting_for.startswith("critic-1 is starting: loading the model")
