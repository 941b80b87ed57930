"""Scale requests for hundreds of replicas, and of several roles at once: launcher, calls and Redis are real."""

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from relaxd.replica.launcher_server import LauncherServicer
from relaxd.roles import REWARD, ROLLOUT
from relaxd.rpc.errors import FailedPrecondition
from relaxd.rpc.leader_term import RedisTerm
from relaxd.rpc.server import Service, start_server
from relaxd.rpc.tls import TlsFiles
from relaxd.v1 import launcher_pb2, launcher_pb2_grpc
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import REPLICA_STATE_IDLE, ReplicaStatus
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.scaling.launchers import LISTED_SECONDS, Launchers
from services.coordinator.scaling.scaler import Scaler
from services.coordinator.state.records import Direction, ScaleRecord, ScaleSpec, ScaleState
from services.coordinator.state.store import AsyncStore, Store
from tests.kit.waiting import eventually

MANY = 300


class Host:
    """A launcher's host that starts nothing, and counts what it is asked."""

    roles = frozenset({ROLLOUT, REWARD})

    def __init__(self) -> None:
        self.there: dict[str, launcher_pb2.Instance] = {}
        self.calls: Counter[str] = Counter()
        self.failing = ""

    def launch(self, request: launcher_pb2.LaunchRequest) -> launcher_pb2.Instance:
        launch_id = request.launch_id
        self.calls["launch"] += 1
        running = launcher_pb2.INSTANCE_STATE_RUNNING
        instance = launcher_pb2.Instance(launch_id=launch_id, role=request.role, state=running)
        if launch_id == self.failing:
            instance.state, instance.detail = launcher_pb2.INSTANCE_STATE_FAILED, "no disk"
        return self.there.setdefault(launch_id, instance)

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        self.there.pop(launch_id, None)

    def instances(self) -> list[launcher_pb2.Instance]:
        self.calls["instances"] += 1
        return list(self.there.values())


class CountingStore(AsyncStore):
    """Redis, and how often scale requests were written to it."""

    written = 0

    async def save_scaling(self, record: ScaleRecord, forget: Any = ()) -> None:
        self.written += 1
        await super().save_scaling(record, forget)


def spec(role: str, replicas: int) -> ScaleSpec:
    return ScaleSpec(direction=Direction.OUT, role=role, replicas=replicas, seconds=120.0)


async def test_hundreds_of_replicas_and_two_roles_at_once(redis_url: str) -> None:
    host = Host()
    launcher = Service(launcher_pb2_grpc.add_LauncherServicer_to_server, LauncherServicer(host), "relaxd.v1.Launcher")
    server = await start_server([launcher], serving=True, fence=RedisTerm(redis_url))
    store = CountingStore(Store(redis_url))
    term = await store.take_over()
    registry = Registry(store, lease_seconds=300.0, heartbeat_seconds=1.0, gpu_lease_seconds=300.0)
    launchers = Launchers(Peers(None, TlsFiles(), term), f"127.0.0.1:{server.port}")
    errors: list[BaseException] = []
    runs: Any = SimpleNamespace(active=None)
    scaler = Scaler(store, registry, runs, launchers, errors.append)

    async def appear(launch_id: str, role: str) -> None:
        await registry.register(
            Registration(replica_id=launch_id, role=role, address="127.0.0.1:9", launch_id=launch_id)
        )
        registry.heartbeat(launch_id, ReplicaStatus(state=REPLICA_STATE_IDLE))

    begun = time.monotonic()
    host.failing = "rollout-many-7"
    await scaler.accept("many", spec(ROLLOUT, MANY))
    await scaler.accept("few", spec(REWARD, 2))
    with pytest.raises(FailedPrecondition, match=r"'many' is in progress .* only one of role rollout"):
        await scaler.accept("more", spec(ROLLOUT, MANY + 1))
    with pytest.raises(FailedPrecondition, match="many, few are in progress: name one"):
        await scaler.log.cancel("")
    await eventually(lambda: host.calls["launch"] == MANY + 2, "all launched", 60.0)
    for number in (1, 2):
        await appear(f"reward-few-{number}", REWARD)
    await eventually(lambda: scaler.log.get("few").state == ScaleState.ACTIVE, "the few", 20.0)
    assert scaler.log.get("many").state == ScaleState.CREATING
    await eventually(lambda: host.failing not in host.there, "the one that failed, removed", 20.0)
    await asyncio.gather(*(appear(f"rollout-many-{n}", ROLLOUT) for n in range(1, MANY + 1) if n != 7))
    await eventually(lambda: scaler.log.get("many").state.ended, "the many", 60.0)
    seconds = time.monotonic() - begun
    await scaler.close()
    await server.stop(0)
    assert not errors
    states = Counter(replica.state for replica in scaler.log.get("many").scaled)
    assert states == {ScaleState.ACTIVE: MANY - 1, ScaleState.FAILED: 1}
    assert scaler.log.replica("many", host.failing).detail == "no disk"
    # One listing for all replicas that are awaited, and changes that come together are written together.
    assert host.calls["instances"] <= seconds / LISTED_SECONDS + 1
    assert store.written < 2 * MANY
    assert [record.model_dump() for record in await store.scaling()] == [
        scaler.log.get(name).model_dump() for name in ("many", "few")
    ]
