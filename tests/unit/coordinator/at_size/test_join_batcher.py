"""When new engines join the weight group: by a clock of the test's own. And what each is told when it joins."""

import asyncio
import contextlib
from typing import Any

import pytest

from relaxd.config import RunConfig, WeightsConfig
from relaxd.roles import ROLLOUT, TRAINER
from relaxd.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from relaxd.v1.sample_pb2 import ELEMENT_TYPE_BFLOAT16
from relaxd.v1.weights_pb2 import TensorSpec, WeightBucket, WeightManifest
from services.coordinator.state.records import GroupRecord, Member, WeightsRecord
from services.coordinator.weights.weight_group_client import WeightGroupClient
from services.coordinator.weights.weight_sync import IDLE_SECONDS, JoinBatcher, WeightSync
from tests.integration.coordinator.fleet_kit import FleetKit
from tests.kit.cases import each


def member(name: str, registered_at: float = 0.0) -> Member:
    return Member(replica_id=name, registered_at=registered_at, address="127.0.0.1:9")


TRAINS, A, B, C, D = member("trainer"), member("a"), member("b"), member("c"), member("d")
GROUP = GroupRecord(name="group", trainer=TRAINS, engines=(A, B))
CONNECTING = 10.0


@each(
    ("looks", "expected"),
    [
        # Seconds, engines that are there -> those to synchronise. Connecting takes 10 s.
        ([(0, (A, B))], (A, B)),
        ([(0, (A, B, C))], (A, B)),  # another may come
        ([(0, (A, B, C)), (4, (A, B, C))], (A, B)),
        ([(0, (A, B, C)), (5, (A, B, C))], (A, B, C)),
        ([(0, (A, B, C)), (4, (A, B, C, D)), (6, (A, B, C, D))], (A, B)),  # another has come
        ([(0, (A, B, C)), (4, (A, B, C, D)), (9, (A, B, C, D))], (A, B, C, D)),
        ([(0, (A, B, C)), (4, (A, B))], (A, B)),  # it is gone again
        ([(0, (A, B, C)), (39, (A, B, C, D)), (40, (A, B, C, D))], (A, B, C, D)),  # long enough
        ([(0, (A, C))], (A, C)),  # B is gone: the group is connected anew in any case
        ([(0, (A, member("b", 1.0)))], (A, member("b", 1.0))),  # as it is when B was started again
    ],
)
def test_newcomers_join_together(looks: list[tuple[float, tuple[Member, ...]]], expected: tuple[Member, ...]) -> None:
    times = [0.0]
    batcher = JoinBatcher(lambda: times[-1])
    batcher.connect_seconds = CONNECTING
    admitted: list[Member] = []
    for seconds, engines in looks:
        times.append(seconds)
        admitted = batcher.admit(TRAINS, engines, GROUP)
    assert tuple(admitted) == expected
    held_back = len(admitted) < len(looks[-1][1])
    assert held_back == (batcher.due_seconds < float("inf"))
    if held_back:
        times.append(times[-1] + batcher.due_seconds)
        assert tuple(batcher.admit(TRAINS, looks[-1][1], GROUP)) == looks[-1][1]


@pytest.mark.parametrize("group", [None, GroupRecord(name="old", trainer=member("before"), engines=(A, B))])
def test_all_join_a_group_that_is_connected_in_any_case(group: GroupRecord | None) -> None:
    batcher = JoinBatcher(lambda: 0.0)
    batcher.connect_seconds = CONNECTING
    assert batcher.admit(TRAINS, (A, B, C), group) == [A, B, C]


def test_before_anything_was_connected_nobody_waits() -> None:
    assert JoinBatcher(lambda: 0.0).admit(TRAINS, (A, B, C), GROUP) == [A, B, C]


async def test_without_a_trainer_those_that_were_due_keep_nobody_busy(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"run": {"steps": 1}, "model": {"path": "/model"}, "data": {"source": "addition"}}
    config = RunConfig.model_validate(values | {"reward": {"name": "addition"}})
    async with contextlib.AsyncExitStack() as stack:
        kit = FleetKit(redis_url)
        stack.push_async_callback(kit.close)
        sync = WeightSync(kit.context(config), WeightsRecord())
        sync._joins.due_seconds = 0.0  # when the trainer was lost
        pauses: list[float] = []

        async def wait(seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.Event().wait()

        monkeypatch.setattr(sync._news, "wait", wait)
        running = asyncio.create_task(sync.run_forever())
        await asyncio.sleep(0)
        running.cancel()
        assert pauses == [IDLE_SECONDS]


class Engine(rollout_pb2_grpc.RolloutServicer):
    """Keeps what it is told when it joins."""

    def __init__(self) -> None:
        self.told: list[rollout_pb2.JoinWeightGroupRequest] = []

    async def JoinWeightGroup(self, request: Any, context: Any) -> rollout_pb2.JoinWeightGroupResponse:
        self.told.append(request)
        return rollout_pb2.JoinWeightGroupResponse()


class Trainer(trainer_pb2_grpc.TrainerServicer):
    """Joins."""

    async def JoinWeightGroup(self, request: Any, context: Any) -> trainer_pb2.TrainerJoinWeightGroupResponse:
        return trainer_pb2.TrainerJoinWeightGroupResponse()


async def test_every_engine_is_told_its_rank_and_the_whole_manifest(redis_url: str) -> None:
    engines = [Engine() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        kit = FleetKit(redis_url)
        stack.push_async_callback(kit.close)
        await kit.serve(
            "trainer", TRAINER, trainer_pb2_grpc.add_TrainerServicer_to_server, Trainer(), "relaxd.v1.Trainer"
        )
        for number, engine in enumerate(engines):
            add = rollout_pb2_grpc.add_RolloutServicer_to_server
            await kit.serve(f"engine-{number}", ROLLOUT, add, engine, "relaxd.v1.Rollout")
        tensors = [TensorSpec(name=f"w{n}", dtype=ELEMENT_TYPE_BFLOAT16, shape=[n, 2]) for n in range(2000)]
        manifest = WeightManifest(buckets=[WeightBucket(tensors=tensors, source_rank=1)])
        answer = trainer_pb2.GetWeightManifestResponse(
            manifest=manifest, source_ranks=2, store_host="host", store_port=7
        )
        trainer = kit.fleet.trainer()
        assert trainer is not None
        members = tuple(engine.member for engine in kit.fleet.engines())
        group = GroupRecord(name="group", trainer=trainer.member, engines=members)
        client = WeightGroupClient(kit.registry, kit.peers, WeightsConfig())
        await client.join(5, group, answer)
    told = [engine.told for engine in engines]
    assert [[(one.sync_id, one.rank, one.group.world_size, one.group.store_port) for one in ours] for ours in told] == [
        [(5, rank, 5, 7)] for rank in (2, 3, 4)
    ]
    assert all(one.manifest == manifest for ours in told for one in ours)
