"""Services that call replicas of another role hear from the coordinator which there are, and never ask for them."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from relaxd.replica import peer_replicas
from relaxd.replica.peer_replicas import NoReplicaError, PeerReplicas
from relaxd.roles import JUDGE, ROLLOUT
from relaxd.rpc.client import channel
from relaxd.rpc.errors import field_violations
from relaxd.rpc.server import RunningServer, start_server
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import rollout_pb2, rollout_pb2_grpc
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub, add_CoordinatorServicer_to_server
from relaxd.v1.replica_pb2 import REPLICA_STATE_DRAINING, WeightVersion
from relaxd.waiting import Backoff
from services.coordinator.api.server import CoordinatorService
from services.coordinator.api.watch_streams import MAX_GONE, ReplicaFeed, RoleChanges
from tests.integration.coordinator.fleet_kit import RUN, FleetKit
from tests.kit.waiting import eventually


class Engine(rollout_pb2_grpc.RolloutServicer):
    def __init__(self) -> None:
        self.asked = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        self.asked += 1
        yield rollout_pb2.GenerateResponse()


class Coordinators:
    """The coordinators of a test, one after another at the same address, on the same Redis."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._kits: list[FleetKit] = []
        self._looking: asyncio.Task[None] | None = None
        self._server: RunningServer | None = None
        self.port = 0

    @property
    def kit(self) -> FleetKit:
        """The fleet of the present one."""
        return self._kits[-1]

    async def start(self) -> None:
        kit = FleetKit(self._redis_url)
        kit.registry.load(await kit.store.replicas(), await kit.store.gpu_holders())
        self._kits.append(kit)
        feed = ReplicaFeed(kit.registry)
        self._looking = asyncio.create_task(feed.look_forever())
        nothing = cast(Any, None)
        service = CoordinatorService(nothing, kit.registry, feed, kit.peers, nothing, nothing)
        registered = (add_CoordinatorServicer_to_server, service, "relaxd.v1.Coordinator")
        self._server = await start_server([registered], port=self.port)
        self.port = self._server.port

    async def stop(self) -> None:
        if self._looking is not None and self._server is not None:
            self._looking.cancel()
            await self._server.stop()

    async def close(self) -> None:
        await self.stop()
        for kit in self._kits:
            await kit.close()


@pytest.fixture
async def coordinators(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Coordinators]:
    monkeypatch.setattr(peer_replicas, "PAUSE", Backoff(0.02, 0.1))
    monkeypatch.setattr(peer_replicas, "FIRST_SECONDS", 20.0)
    coordinators = Coordinators(redis_url)
    await coordinators.start()
    yield coordinators
    await coordinators.close()


@pytest.fixture
async def stub(coordinators: Coordinators) -> AsyncIterator[CoordinatorStub]:
    async with channel(f"127.0.0.1:{coordinators.port}") as to:
        yield CoordinatorStub(to)


@pytest.fixture
async def peers(stub: CoordinatorStub) -> AsyncIterator[PeerReplicas[Any]]:
    """The engines, as an agent follows them."""
    settings = ServiceSettings(role="agent")
    peers = PeerReplicas(ROLLOUT, rollout_pb2_grpc.RolloutStub, stub, settings, RUN, serving=True)
    yield peers
    await peers.close()


async def add_engine(coordinators: Coordinators, name: str) -> Engine:
    engine, add = Engine(), rollout_pb2_grpc.add_RolloutServicer_to_server
    await coordinators.kit.serve(name, ROLLOUT, add, engine, "relaxd.v1.Rollout")
    beat(coordinators, name, 1)
    return engine


def beat(coordinators: Coordinators, name: str, version: int) -> None:
    coordinators.kit.beat(name, weights=WeightVersion(term=1, version=version))


def ready(peers: PeerReplicas[Any]) -> dict[str, int | None]:
    return {peer.replica_id: peer.version for peer in peers.ready}


async def ask(peers: PeerReplicas[Any], preferred: str = "") -> str:
    """Call an engine; return its name."""
    peer = await peers.choose(preferred)
    with peer.called() as stub:
        async for _ in stub.Generate(rollout_pb2.GenerateRequest(), timeout=20):
            pass
    return peer.replica_id


async def test_an_engine_that_goes_is_not_called_again(coordinators: Coordinators, peers: PeerReplicas[Any]) -> None:
    first, second = await add_engine(coordinators, "rollout-1"), await add_engine(coordinators, "rollout-2")
    await eventually(lambda: ready(peers) == {"rollout-1": 1, "rollout-2": 1}, "both engines")
    assert await ask(peers, "rollout-1") == "rollout-1"
    await coordinators.kit.lose("rollout-1")  # its server would answer
    await eventually(lambda: ready(peers) == {"rollout-2": 1}, "the news")
    assert [await ask(peers, "rollout-1") for _ in range(3)] == ["rollout-2"] * 3
    assert (first.asked, second.asked) == (1, 3)
    beat(coordinators, "rollout-2", 2)
    await eventually(lambda: ready(peers) == {"rollout-2": 2}, "the version")
    coordinators.kit.beat("rollout-2", detail="has no weights")
    await eventually(lambda: not peers.ready, "the loss of its weights")
    with pytest.raises(NoReplicaError, match=r"no rollout replica is ready \(rollout-2: has no weights\)"):
        await peers.choose()


async def test_an_engine_that_returns_at_another_address_is_called_there(
    coordinators: Coordinators, peers: PeerReplicas[Any]
) -> None:
    before = await add_engine(coordinators, "rollout-1")
    await eventually(lambda: ready(peers) == {"rollout-1": 1}, "the engine")
    assert await ask(peers) == "rollout-1"
    after = await add_engine(coordinators, "rollout-1")  # the first server would still answer
    (peer,) = peers.ready
    await eventually(lambda: peers.ready and peers.ready[0].address != peer.address, "the new address")
    assert await ask(peers) == "rollout-1"
    assert (before.asked, after.asked) == (1, 1)


async def test_engines_are_called_while_the_coordinator_restarts(
    coordinators: Coordinators, peers: PeerReplicas[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, peer_replicas.__name__)
    for name in ("rollout-1", "rollout-2"):
        await add_engine(coordinators, name)
    await eventually(lambda: len(peers.ready) == 2, "both engines")
    await coordinators.stop()
    await eventually(lambda: "because the coordinator is away" in caplog.text, "the warning")
    assert {await ask(peers, name) for name in ("rollout-1", "rollout-2")} == {"rollout-1", "rollout-2"}
    await coordinators.start()  # it hasn't heard of them yet
    await eventually(lambda: "the coordinator is back" in caplog.text, "the news")
    assert ready(peers) == {"rollout-1": 1, "rollout-2": 1}
    await coordinators.kit.lose("rollout-1")
    beat(coordinators, "rollout-2", 2)
    await eventually(lambda: ready(peers) == {"rollout-2": 2}, "the changes")
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1


async def test_messages_have_only_what_has_changed(coordinators: Coordinators, stub: CoordinatorStub) -> None:
    request = pb.WatchReplicasRequest(role=ROLLOUT, max_seconds=20)
    stream = stub.WatchReplicas(request, timeout=30)
    empty = await stream.read()
    assert (empty.complete, list(empty.replicas)) == (True, [])
    for name in ("rollout-1", "rollout-2"):
        await coordinators.kit.serve(name, ROLLOUT, lambda service, server: None, None, "relaxd.v1.Rollout")
    names: list[str] = []
    while len(set(names)) < 2:
        last = await stream.read()
        assert not last.complete
        names += [one.replica_id for one in last.replicas]
    for _ in range(3):
        beat(coordinators, "rollout-2", 1)  # twice, nothing is new
        coordinators.kit.beat("rollout-1")
    coordinators.kit.registry.heartbeat("rollout-1", pb.HeartbeatRequest(status={"detail": "is tired"}).status)
    coordinators.kit.registry.heartbeat(
        "rollout-2", pb.HeartbeatRequest(status={"state": REPLICA_STATE_DRAINING, "detail": "drains"}).status
    )
    seen: dict[str, str] = {}
    while seen.get("rollout-1") != "is tired" or seen.get("rollout-2") != "drains":
        last = await stream.read()
        seen |= {one.replica_id: one.detail for one in last.replicas}
    await coordinators.kit.lose("rollout-1")
    gone = await stream.read()
    assert (gone.complete, list(gone.replicas), list(gone.gone)) == (False, [], ["rollout-1"])
    stream.cancel()

    async def first(after: int) -> pb.WatchReplicasResponse:
        found = stub.WatchReplicas(pb.WatchReplicasRequest(role=ROLLOUT, after=after, max_seconds=0.01), timeout=30)
        (message,) = [message async for message in found]
        return message

    assert await first(last.change) == gone
    assert await first(gone.change) == pb.WatchReplicasResponse(change=gone.change)
    for unknown in (0, 7, gone.change + 1):
        whole = await first(unknown)
        assert (whole.complete, [one.replica_id for one in whole.replicas]) == (True, ["rollout-2"])


async def test_a_watch_ends_in_time_though_changes_do_not(coordinators: Coordinators, stub: CoordinatorStub) -> None:
    await add_engine(coordinators, "rollout-1")

    async def change() -> None:
        for version in itertools.count(2):
            beat(coordinators, "rollout-1", version)
            await asyncio.sleep(0.001)

    changing = asyncio.create_task(change())
    stream = stub.WatchReplicas(pb.WatchReplicasRequest(role=ROLLOUT, max_seconds=0.3), timeout=15)
    versions = [one.weights.version async for message in stream for one in message.replicas]
    changing.cancel()
    assert len(versions) >= 2
    assert versions == sorted(set(versions))


async def test_a_bad_watch_is_refused(stub: CoordinatorStub) -> None:
    request = pb.WatchReplicasRequest(role="engine", after=-1, max_seconds=301)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.WatchReplicas(request, timeout=20).read()
    assert {field for field, _ in field_violations(caught.value)} == {"role", "after", "max_seconds"}
    whole = await stub.WatchReplicas(pb.WatchReplicasRequest(role=JUDGE), timeout=20).read()
    assert whole.complete


async def test_of_many_that_are_gone_only_the_last_are_remembered(coordinators: Coordinators) -> None:
    changes, registry = RoleChanges(), coordinators.kit.registry
    begun = changes.number
    await add_engine(coordinators, "rollout-1")
    (engine,) = registry.of_role(ROLLOUT)
    for number in range(MAX_GONE + 1):
        engine.registration.replica_id = f"rollout-{number}"
        changes.look([engine])
    assert len(changes.since(begun + 1).gone) == MAX_GONE
    changes.look([])
    known = changes.since(changes.number - 1)
    assert (known.complete, list(known.gone)) == (False, [f"rollout-{MAX_GONE}"])
    forgotten = changes.since(begun + 1)
    assert (forgotten.complete, list(forgotten.replicas)) == (True, [])
