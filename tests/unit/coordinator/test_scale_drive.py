"""How one replica of a scale request ends, by a clock of the test's own; its launcher and its calls are real."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from relaxd.replica.launcher_server import LauncherServicer
from relaxd.rpc.errors import FailedPrecondition, Unavailable
from relaxd.rpc.leader_term import RedisTerm
from relaxd.rpc.server import Service, start_server
from relaxd.rpc.tls import TlsFiles
from relaxd.v1 import launcher_pb2, launcher_pb2_grpc, replica_pb2_grpc
from relaxd.v1 import replica_pb2 as pb
from relaxd.v1.coordinator_pb2 import Registration
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.scaling import launchers
from services.coordinator.scaling import replica_drive as module
from services.coordinator.scaling.launchers import Launchers
from services.coordinator.scaling.replica_drive import HAND_BACK_SECONDS, ReplicaDrive
from services.coordinator.scaling.scale_log import ScaleFilter, ScaleLog
from services.coordinator.scaling.scaler import Scaler
from services.coordinator.state.records import Direction, ScaledReplica, ScaleRecord, ScaleSpec, ScaleState
from services.coordinator.state.store import AsyncStore, Store
from tests.kit.waiting import eventually

LAUNCH, SECONDS = "rollout-r-1", 60.0
IDLE, FAILED = pb.REPLICA_STATE_IDLE, pb.REPLICA_STATE_FAILED


class Host:
    """A launcher's host that starts nothing, and remembers what it was told to."""

    roles = frozenset({"rollout"})

    def __init__(self) -> None:
        self.there: dict[str, launcher_pb2.Instance] = {}
        self.launches: list[launcher_pb2.LaunchRequest] = []
        self.refusal: Exception | None = None

    def launch(self, request: launcher_pb2.LaunchRequest) -> launcher_pb2.Instance:
        if self.refusal is not None:
            raise self.refusal
        self.launches.append(request)
        instance = launcher_pb2.Instance(launch_id=request.launch_id, role=request.role)
        return self.there.setdefault(request.launch_id, instance)

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        self.there.pop(launch_id, None)

    def instances(self) -> list[launcher_pb2.Instance]:
        return list(self.there.values())


class Holder(replica_pb2_grpc.ReplicaServicer):
    """A replica that is asked to drain, and holds groups."""

    def __init__(self) -> None:
        self.held_groups = 2
        self.asked = 0

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.asked += 1
        return pb.DrainResponse(held_groups=self.held_groups)


class Desk:
    """A coordinator's scaling of one replica, without a run."""

    def __init__(self, redis_url: str, port: int, host: Host, holder: Holder) -> None:
        self.now = 1e9
        self.host, self.holder = host, holder
        self.address = f"127.0.0.1:{port}"
        self.errors: list[BaseException] = []
        self.store = store = AsyncStore(Store(redis_url))
        term = store.in_threads.take_over()
        self.registry = Registry(store, lease_seconds=6.0, heartbeat_seconds=1.0, gpu_lease_seconds=60.0)
        self.log = ScaleLog(store, self.registry.changed)
        self.launchers = Launchers(Peers(None, TlsFiles(), term), self.address)

    async def begin(self, direction: Direction) -> "asyncio.Task[None]":
        """Drive the replica of a request that is made now."""
        spec = ScaleSpec(direction=direction, role="rollout", replicas=1, seconds=SECONDS)
        deadline = datetime.fromtimestamp(self.now + SECONDS, UTC)
        scaled = (ScaledReplica(launch_id=LAUNCH),)
        await self.log.add(ScaleRecord(request_id="r", spec=spec, scaled=scaled, deadline=deadline))
        runs: Any = SimpleNamespace(active=None)
        drive = ReplicaDrive(
            LAUNCH, "r", self.log, registry=self.registry, runs=runs, launchers=self.launchers, clock=lambda: self.now
        )
        return asyncio.create_task(drive.run())

    def scaler(self) -> Scaler:
        """Return the scaler of a coordinator that starts now."""
        runs: Any = SimpleNamespace(active=None)
        return Scaler(self.store, self.registry, runs, self.launchers, self.errors.append)

    async def register(
        self, state: "pb.ReplicaState.ValueType", detail: str = "", name: str = "one", launch_id: str = LAUNCH
    ) -> None:
        await self.registry.register(
            Registration(replica_id=name, role="rollout", address=self.address, launch_id=launch_id)
        )
        self.registry.heartbeat(name, pb.ReplicaStatus(state=state, detail=detail))

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.registry.changed.fire()

    @property
    def scaled(self) -> ScaledReplica:
        return self.log.get("r").scaled[0]

    async def until(self, state: ScaleState, detail: str = "") -> None:
        await eventually(lambda: self.scaled.state == state and detail in self.scaled.detail, f"{state} {detail}", 20.0)


@pytest.fixture
async def desk(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(launchers, "LISTED_SECONDS", 0.0)
    host, holder = Host(), Holder()
    launcher = LauncherServicer(host)
    services = [
        Service(launcher_pb2_grpc.add_LauncherServicer_to_server, launcher, "relaxd.v1.Launcher"),
        Service(replica_pb2_grpc.add_ReplicaServicer_to_server, holder, "relaxd.v1.Replica"),
    ]
    server = await start_server(services, serving=True, fence=RedisTerm(redis_url))
    yield Desk(redis_url, server.port, host, holder)
    await server.stop(0)


def break_it(desk: Desk) -> None:
    desk.host.there[LAUNCH].state = launcher_pb2.INSTANCE_STATE_FAILED
    desk.host.there[LAUNCH].detail = "exited with code 1"


@pytest.mark.parametrize(
    ("said", "seconds", "then", "expected", "detail"),
    [
        (IDLE, 0.0, None, ScaleState.ACTIVE, ""),
        (None, SECONDS + 1, None, ScaleState.FAILED, "not active within 60 s: it has not registered yet"),
        (FAILED, SECONDS + 1, None, ScaleState.FAILED, "not active within 60 s: no disk"),
        (None, 1.0, break_it, ScaleState.FAILED, "exited with code 1"),
        (None, 1.0, lambda desk: desk.host.there.clear(), ScaleState.FAILED, "it is gone"),
    ],
)
async def test_out(
    desk: Desk,
    said: "pb.ReplicaState.ValueType | None",
    seconds: float,
    then: Callable[[Desk], None] | None,
    expected: ScaleState,
    detail: str,
) -> None:
    driving = await desk.begin(Direction.OUT)
    await eventually(lambda: LAUNCH in desk.host.there, "it is launched", 20.0)
    if said is not None:
        await desk.register(said, "no disk" if said == FAILED else "")
    desk.passes(SECONDS - 1)
    await desk.until(ScaleState.ACTIVE if expected == ScaleState.ACTIVE else ScaleState.CREATING)
    if then is not None:
        then(desk)
    desk.passes(seconds)
    await asyncio.wait_for(driving, 20.0)
    assert (desk.scaled.state, desk.scaled.detail) == (expected, detail)
    assert (LAUNCH in desk.host.there) == (expected == ScaleState.ACTIVE)  # what failed is removed
    assert bool(desk.registry.all()) == (expected == ScaleState.ACTIVE)


async def test_a_launcher_that_is_full_is_asked_again_until_the_deadline(desk: Desk) -> None:
    desk.host.refusal = Unavailable("all GPUs are taken")
    driving = await desk.begin(Direction.OUT)
    await desk.until(ScaleState.CREATING, "all GPUs are taken")
    desk.passes(SECONDS + 1)
    await asyncio.wait_for(driving, 20.0)
    assert desk.scaled.state == ScaleState.FAILED
    assert desk.scaled.detail.startswith("not active within 60 s: could not be started: ")


async def test_the_reason_of_a_wait_on_its_host_is_told(desk: Desk) -> None:
    driving = await desk.begin(Direction.OUT)
    await eventually(lambda: LAUNCH in desk.host.there, "it is launched", 20.0)
    waits = "pod r-1: pending: no node has a GPU"
    instance = desk.host.there[LAUNCH]
    instance.state, instance.detail = launcher_pb2.INSTANCE_STATE_PENDING, waits
    await desk.until(ScaleState.CREATING, waits)
    instance.state = launcher_pb2.INSTANCE_STATE_RUNNING
    await eventually(lambda: not desk.scaled.detail, "it waits no more", 20.0)
    instance.state = launcher_pb2.INSTANCE_STATE_PENDING
    await desk.until(ScaleState.CREATING, waits)
    desk.passes(SECONDS + 1)
    await asyncio.wait_for(driving, 20.0)
    assert (desk.scaled.state, desk.scaled.detail) == (ScaleState.FAILED, f"not active within 60 s: {waits}")


async def test_what_is_cancelled_on_its_way_up_is_removed(desk: Desk) -> None:
    driving = await desk.begin(Direction.OUT)
    await eventually(lambda: LAUNCH in desk.host.there, "it is launched", 20.0)
    await desk.log.cancel("r")
    await asyncio.wait_for(driving, 20.0)
    assert (desk.scaled.state, desk.scaled.detail) == (ScaleState.CANCELLED, "cancelled")
    assert not desk.host.there


@pytest.mark.parametrize("ends_by", ["work that is done", "its deadline", "death", "cancellation"])
async def test_in(desk: Desk, ends_by: str) -> None:
    desk.host.launch(launcher_pb2.LaunchRequest(launch_id=LAUNCH, role="rollout"))
    await desk.register(IDLE)
    driving = await desk.begin(Direction.IN)
    await desk.until(ScaleState.DRAINING, "it holds 2 groups")
    (one,) = desk.registry.all()
    assert (one.draining, one.drain_until) == (True, 1e9 + SECONDS)
    desk.passes(SECONDS + HAND_BACK_SECONDS - 1)
    await eventually(lambda asked=desk.holder.asked: desk.holder.asked > asked + 1, "it is asked again", 20.0)
    assert not driving.done()
    if ends_by == "work that is done":
        desk.holder.held_groups = 0
    elif ends_by == "its deadline":
        desk.passes(2.0)
    elif ends_by == "death":
        await desk.registry.remove([one])
    else:
        await desk.log.cancel("r")
    await asyncio.wait_for(driving, 20.0)
    if ends_by == "cancellation":  # it works again
        assert (desk.scaled.state, LAUNCH in desk.host.there, one.draining) == (ScaleState.CANCELLED, True, False)
    else:
        assert (desk.scaled.state, desk.host.there, desk.registry.all()) == (ScaleState.DONE, {}, [])


@pytest.mark.parametrize("restarts", [False, True])
async def test_rollback_all_removes_active_replicas_when_another_fails(desk: Desk, restarts: bool) -> None:
    scaler = desk.scaler()
    spec = ScaleSpec(direction=Direction.OUT, role="rollout", replicas=2, seconds=SECONDS, rollback_all=True)
    await scaler.accept("r", spec)
    first, second = "rollout-r-1", "rollout-r-2"
    await eventually(lambda: len(desk.host.there) == 2, "both are launched", 20.0)
    await desk.register(IDLE, name="one", launch_id=first)
    await eventually(lambda: scaler.log.replica("r", first).state == ScaleState.ACTIVE, "one is active", 20.0)
    assert scaler.log.get("r").state == ScaleState.CREATING

    desk.host.there[second].state = launcher_pb2.INSTANCE_STATE_FAILED
    desk.host.there[second].detail = "exited with code 1"
    await eventually(lambda: desk.holder.asked, "the active one is asked to drain", 20.0)
    with pytest.raises(FailedPrecondition, match="there is nothing left to roll back"):
        await scaler.log.cancel("r")
    if restarts:
        await scaler.close()
        scaler = desk.scaler()
        await scaler.resume()
    desk.holder.held_groups = 0
    await eventually(lambda: scaler.log.get("r").state.ended, "it has ended", 20.0)
    record = scaler.log.get("r")
    assert (record.state, desk.host.there, desk.registry.all()) == (ScaleState.FAILED, {}, [])
    assert [(one.state, one.detail) for one in record.scaled] == [
        (ScaleState.CANCELLED, "rolled back, because another replica failed"),
        (ScaleState.FAILED, "exited with code 1"),
    ]
    assert desk.errors == []


async def test_dry_runs_change_nothing_and_cancel_all_takes_a_filter(desk: Desk) -> None:
    scaler = desk.scaler()

    def spec(role: str, **fields: Any) -> ScaleSpec:
        return ScaleSpec(direction=Direction.OUT, role=role, replicas=1, seconds=SECONDS, **fields)

    planned = await scaler.accept("r", spec("rollout"), dry_run=True)
    assert [one.launch_id for one in planned.scaled] == [LAUNCH]
    assert (scaler.log.all(), desk.host.there) == ([], {})

    desk.host.refusal = Unavailable("all GPUs are taken")
    for role in ("rollout", "reward"):
        await scaler.accept(role, spec(role))
    both = await scaler.cancel_all(ScaleFilter(), dry_run=True)
    assert ([one.request_id for one in both[0]], both[1]) == (["reward", "rollout"], [])
    assert not any(one.cancelled for one in scaler.log.all())
    assert await scaler.cancel_all(ScaleFilter(states=frozenset({ScaleState.SYNCING})), dry_run=False) == ([], [])
    (cancelled,), _ = await scaler.cancel_all(ScaleFilter(role="reward"), dry_run=False)
    assert (cancelled.request_id, cancelled.cancelled) == ("reward", True)
    await eventually(lambda: scaler.log.get("reward").state == ScaleState.CANCELLED, "it is cancelled", 20.0)
    assert [one.request_id for one in scaler.log.in_progress()] == ["rollout"]
    await scaler.close()


async def test_a_server_given_by_url_has_one_replica(desk: Desk) -> None:
    scaler = desk.scaler()

    def spec(*urls: str) -> ScaleSpec:
        return ScaleSpec(direction=Direction.OUT, role="rollout", sglang_urls=urls, seconds=SECONDS)

    await scaler.accept("r", spec("http://gpu-1:30000"))
    await eventually(lambda: desk.host.launches, "it is launched", 20.0)
    (launch,) = desk.host.launches
    assert (launch.launch_id, launch.sglang_url) == ("sglang-gpu-1-30000", "http://gpu-1:30000")
    await desk.register(IDLE, launch_id=launch.launch_id)
    await eventually(lambda: scaler.log.get("r").state == ScaleState.ACTIVE, "it is active", 20.0)
    more = await scaler.accept("s", spec("http://GPU-1:30000", "http://[fd00::2]:30000"), dry_run=True)
    assert [one.launch_id for one in more.scaled] == ["sglang-fd00-2-30000"]
    await scaler.close()
