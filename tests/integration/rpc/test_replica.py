"""The life of a replica: a real process, and over a real connection a coordinator that says what the test wants.

The real coordinator has tests of its own; here its answers have to be wrong, late or missing at the right moment.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from relaxd import PROTOCOL_VERSION
from relaxd.config import DataConfig, ModelConfig, RewardConfig, RunConfig, RunSection
from relaxd.replica import RESTART
from relaxd.roles import REWARD
from relaxd.rpc.client import channel
from relaxd.rpc.errors import FailedPrecondition, NotFound
from relaxd.rpc.server import RunningServer, start_server
from relaxd.v1 import coordinator_pb2, coordinator_pb2_grpc, replica_pb2, replica_pb2_grpc
from tests.kit.ports import free_port

PATIENCE = 90.0
"""Longest wait for what a process has to start for, in seconds."""
CONFIG = RunConfig(
    run=RunSection(steps=1),
    model=ModelConfig(path="model"),
    data=DataConfig(source="addition"),
    reward=RewardConfig(name="addition"),
).model_dump_json()
IDLE, STARTING, READY = (
    replica_pb2.REPLICA_STATE_IDLE,
    replica_pb2.REPLICA_STATE_STARTING,
    replica_pb2.REPLICA_STATE_READY,
)
DRAINING, FAILED = replica_pb2.REPLICA_STATE_DRAINING, replica_pb2.REPLICA_STATE_FAILED
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    def __init__(self) -> None:
        self.assignment = coordinator_pb2.Assignment()
        self.drain = False
        self.term = 0
        self.refusal: Exception | None = None
        self.registered: dict[str, coordinator_pb2.Registration] = {}
        self.registrations = 0
        self.heard_before = 0
        """Heartbeats before the last registration."""
        self.statuses: list[replica_pb2.ReplicaStatus] = []
        self.heard = asyncio.Condition()

    def assign(
        self, run_id: str, state: coordinator_pb2.RunState.ValueType = coordinator_pb2.RUN_STATE_RUNNING
    ) -> None:
        self.assignment = coordinator_pb2.Assignment(run_id=run_id, config_json=CONFIG, state=state)

    async def Register(self, request, context):
        if self.refusal:
            raise self.refusal
        self.registered[request.registration.replica_id] = request.registration
        async with self.heard:
            self.registrations += 1
            self.heard_before = len(self.statuses)
            self.heard.notify_all()
        return coordinator_pb2.RegisterResponse(
            lease_seconds=1, heartbeat_seconds=0.1, assignment=self.assignment, term=self.term
        )

    async def Heartbeat(self, request, context):
        if request.replica_id not in self.registered:
            raise NotFound(f"no replica {request.replica_id}")
        async with self.heard:
            self.statuses.append(request.status)
            self.heard.notify_all()
        return coordinator_pb2.HeartbeatResponse(assignment=self.assignment, drain=self.drain, term=self.term)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE), self.heard:
            await self.heard.wait_for(condition)

    async def hears(self, state: replica_pb2.ReplicaState.ValueType) -> replica_pb2.ReplicaStatus:
        """The next heartbeat with this state."""
        await self.until(lambda: self.statuses and self.statuses[-1].state == state)
        return self.statuses[-1]


class Process:
    """A replica process, its words read as they come."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port
        self.said: list[str] = []

    async def says(self, *expected: str) -> None:
        """Read up to the last of the expected lines: they are the next ones, and nothing lies between them."""
        assert self.process.stdout
        for line in expected:
            async with asyncio.timeout(PATIENCE):
                assert (await self.process.stdout.readline()).decode().strip() == line

    async def ends(self) -> tuple[int, str]:
        """Its exit code and its log."""
        assert self.process.stderr
        async with asyncio.timeout(PATIENCE):
            log = (await self.process.stderr.read()).decode()
            return await self.process.wait(), log


@pytest.fixture
async def coordinator() -> Coordinator:
    return Coordinator()


@asynccontextmanager
async def serving(coordinator: Coordinator, port: int = 0) -> AsyncIterator[RunningServer]:
    add = coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    server = await start_server([(add, coordinator, "relaxd.v1.Coordinator")], port=port)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def replica(coordinator_port: int, *arguments: str, **environment: str) -> AsyncIterator[Process]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        Path(__file__).parent / "replica_main.py",
        *(
            "--coordinator",
            f"127.0.0.1:{coordinator_port}",
            "--port",
            str(port),
            "--replica-id",
            "reward-1",
            *arguments,
        ),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process, port)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def health(port: int) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    async with channel(f"127.0.0.1:{port}") as to:
        request = health_pb2.HealthCheckRequest(service="relaxd.v1.Replica")
        return (await health_pb2_grpc.HealthStub(to).Check(request, wait_for_ready=True, timeout=PATIENCE)).status


async def test_follows_its_assignment(coordinator):
    async with serving(coordinator) as server, replica(server.port) as process:
        await coordinator.hears(IDLE)
        registration = coordinator.registered["reward-1"]
        assert registration.role == REWARD
        assert registration.address == f"127.0.0.1:{process.port}"
        assert registration.protocol_version == PROTOCOL_VERSION
        assert await health(process.port) == SERVING
        coordinator.assign("one")
        await process.says("start one")
        status = await coordinator.hears(READY)
        assert (status.run_id, status.detail, status.gauges["pid"]) == ("one", "talking", process.process.pid)
        coordinator.assign("one", coordinator_pb2.RUN_STATE_PAUSED)
        await process.says("pause")
        coordinator.assign("one", coordinator_pb2.RUN_STATE_RUNNING)
        await process.says("resume")
        coordinator.assignment.begin_time.FromSeconds(7)  # it ended, and was restored before the next heartbeat
        await process.says("stop", "start one")
        coordinator.assignment.state = coordinator_pb2.RUN_STATE_STOPPING  # the last evaluation still needs everyone
        coordinator.assign("two")
        await process.says("stop", "start two")
        coordinator.assign("two", coordinator_pb2.RUN_STATE_STOPPED)
        await process.says("stop")
        assert (await coordinator.hears(IDLE)).run_id == ""
        coordinator.assign("slow-three")
        await process.says("start slow-three")
        await coordinator.hears(STARTING)
        coordinator.assign("four")
        await process.says("cancelled slow-three", "stop", "start four")
        process.process.send_signal(signal.SIGTERM)
        await process.says("drain", "stop")
        assert (await process.ends())[0] == 0


async def test_waits_for_a_coordinator_and_survives_its_restarts(coordinator):
    port = free_port()
    async with replica(port) as process:
        assert await health(process.port) == NOT_SERVING
        coordinator.assign("one")
        async with serving(coordinator, port):
            await process.says("start one")
            await coordinator.hears(READY)
            assert await health(process.port) == SERVING
        heartbeats = len(coordinator.statuses)
        async with serving(coordinator, port):  # back, with what it knew
            await coordinator.until(lambda: len(coordinator.statuses) > heartbeats)
            assert coordinator.registrations == 1
        coordinator.registered.clear()
        async with serving(coordinator, port):  # back, knowing nothing
            await coordinator.until(lambda: coordinator.registrations == 2)
            heartbeats = len(coordinator.statuses)
            await coordinator.until(lambda: len(coordinator.statuses) > heartbeats)
            assert coordinator.statuses[-1].state == READY
        process.process.send_signal(signal.SIGTERM)
        await process.says("drain", "stop")  # and the run was never started again
        code, log = await process.ends()
        assert code == 0
        assert log.count("does not answer") <= 4  # once per outage, not once per attempt


async def test_a_start_that_fails_is_reported_and_tried_again(coordinator):
    coordinator.assign("one")
    async with serving(coordinator) as server, replica(server.port, FAIL_STARTS="1") as process:
        await process.says("start one", "stop")
        status = await coordinator.hears(FAILED)
        assert "OSError: the disk is full" in status.detail
        assert "attempt 1" in status.detail
        assert not status.start_refused  # the next one may succeed
        assert status.wait == replica_pb2.REPLICA_WAIT_UNSPECIFIED  # `detail` tells of no wait
        await process.says("start one")
        again = await coordinator.hears(READY)
        assert again.gauges["seconds_between_starts"] > 0.9  # not at every heartbeat


@pytest.mark.parametrize(
    ("gpu_wait", "detail", "wait"),
    [
        ("", "talking", replica_pb2.REPLICA_WAIT_SERVICE),
        ("rollout-9 holds GPU-1", "rollout-9 holds GPU-1", replica_pb2.REPLICA_WAIT_GPUS),
    ],
)
async def test_a_status_has_the_code_of_the_wait_that_its_detail_tells_of(coordinator, gpu_wait, detail, wait):
    coordinator.assign("one")
    async with serving(coordinator) as server, replica(server.port, GPU_WAIT=gpu_wait):
        status = await coordinator.hears(READY)
        assert (status.detail, status.wait) == (detail, wait)


async def test_registers_again_when_a_run_changes_the_ranks_of_its_engine(coordinator):
    async with serving(coordinator) as server, replica(server.port, ENGINE_RANKS="2") as process:
        await coordinator.hears(IDLE)
        assert coordinator.registered["reward-1"].engine_ranks == 0
        coordinator.assign("one")
        await process.says("start one")
        await coordinator.until(lambda: coordinator.registered["reward-1"].engine_ranks == 2)
        assert coordinator.registrations == 2
        # Nobody is told that it is ready as what it was before.
        assert READY not in [status.state for status in coordinator.statuses[: coordinator.heard_before]]
        await coordinator.hears(READY)
        assert coordinator.registrations == 2


async def test_a_configuration_that_cannot_be_read_is_reported(coordinator):
    coordinator.assignment = coordinator_pb2.Assignment(
        run_id="one", config_json='{"run": {"steps": 0}}', state=coordinator_pb2.RUN_STATE_RUNNING
    )
    async with serving(coordinator) as server, replica(server.port):
        status = await coordinator.hears(FAILED)
        assert "config_json.run.steps" in status.detail
        assert status.start_refused


async def test_another_protocol_version_ends_the_replica(coordinator):
    coordinator.refusal = FailedPrecondition("protocol version 1 of reward-1 is not this coordinator's, 2: update it")
    async with serving(coordinator) as server, replica(server.port) as process:
        code, log = await process.ends()
    assert code == 1
    assert (
        f"the coordinator at 127.0.0.1:{server.port} refuses reward-1: FAILED_PRECONDITION: protocol version 1" in log
    )
    assert "Traceback" not in log


async def test_a_taken_port_ends_the_replica(coordinator):
    async with serving(coordinator) as server, replica(server.port, "--port", str(server.port)) as process:
        code, log = await process.ends()
    assert code == 1
    assert f"port {server.port} on 127.0.0.1 is taken" in log
    assert "Traceback" not in log


async def test_sigterm_drains_within_the_grace_period(coordinator, tmp_path):
    coordinator.assign("one")
    environment = {"HELD": "2", "STUCK": "1", "DRAIN_UNTIL": str(tmp_path / "drained")}
    grace = ("--grace-seconds", str(PATIENCE))
    async with serving(coordinator) as server, replica(server.port, *grace, **environment) as process:
        assert (await coordinator.hears(READY)).held_groups == 2
        process.process.send_signal(signal.SIGTERM)
        await coordinator.hears(DRAINING)
        assert await health(process.port) == NOT_SERVING
        (tmp_path / "drained").touch()
        await process.says("start one", "drain", "stop")
        code, log = await process.ends()
    assert code == 0
    assert "still holding 1 groups" in log


async def test_a_drain_that_never_ends_is_cut_at_the_grace_period(coordinator):
    coordinator.assign("one")
    grace = ("--grace-seconds", "0.5")
    async with serving(coordinator) as server, replica(server.port, *grace, DRAIN_SECONDS="60") as process:
        await coordinator.hears(READY)
        process.process.send_signal(signal.SIGTERM)
        begun = asyncio.get_running_loop().time()
        assert (await process.ends())[0] == 0
        assert asyncio.get_running_loop().time() - begun < 30


async def test_a_second_signal_ends_at_once(coordinator):
    coordinator.assign("one")
    async with serving(coordinator) as server, replica(server.port, DRAIN_SECONDS="60") as process:
        await coordinator.hears(READY)
        process.process.send_signal(signal.SIGTERM)
        await process.says("start one", "drain")
        process.process.send_signal(signal.SIGINT)
        assert (await process.ends())[0] == 1


async def test_drains_when_asked_and_works_again_with_the_next_run(coordinator):
    coordinator.assign("one")
    async with serving(coordinator) as server, replica(server.port, HELD="3") as process:
        await coordinator.hears(READY)
        async with channel(f"127.0.0.1:{process.port}", term=1) as to:
            stub = replica_pb2_grpc.ReplicaStub(to)
            assert (await stub.Drain(replica_pb2.DrainRequest(), timeout=10)).held_groups == 0
            status = (await stub.GetStatus(replica_pb2.GetStatusRequest())).status
            assert (status.state, status.run_id) == (DRAINING, "one")
        await process.says("start one", "drain")
        coordinator.assign("two")
        await process.says("stop", "start two")
        await coordinator.hears(READY)
        coordinator.drain = True
        await process.says("drain")
        assert (await coordinator.hears(DRAINING)).run_id == "two"
        coordinator.assign("three")  # still to be drained: the new run is not for this replica
        await process.says("stop")
        await coordinator.until(lambda: coordinator.statuses[-1].run_id == "")
        assert coordinator.statuses[-1].state == DRAINING


async def test_obeys_the_newest_coordinator_only(coordinator):
    async def drain(port: int, term: int) -> None:
        async with channel(f"127.0.0.1:{port}", term=term) as to:
            await replica_pb2_grpc.ReplicaStub(to).Drain(replica_pb2.DrainRequest(), timeout=10)

    coordinator.assign("one")
    coordinator.term = 5
    async with serving(coordinator) as server, replica(server.port) as process:
        await coordinator.hears(READY)
        # The replica knows term 5 from its registration alone.
        for term, message in (
            (4, "the coordinator of term 4 was replaced: the newest has 5"),
            (0, "/relaxd.v1.Replica/Drain needs the coordinator's term"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
                await drain(process.port, term)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await drain(process.port, 5)
        async with channel(f"127.0.0.1:{process.port}") as to:  # looking needs no term
            answer = await replica_pb2_grpc.ReplicaStub(to).GetStatus(replica_pb2.GetStatusRequest(), timeout=10)
            assert answer.status.state == DRAINING
        # A coordinator on a new Redis begins with term 1, and the replica hears of it at its next heartbeat.
        coordinator.term = 1
        seen = len(coordinator.statuses)
        await coordinator.until(lambda: len(coordinator.statuses) > seen + 1)
        await drain(process.port, 1)


@pytest.mark.slow
async def test_restarts_when_told_whatever_hangs(coordinator):
    async def restart(process: Process, replica_id: str) -> None:
        async with channel(f"127.0.0.1:{process.port}", term=1) as to:
            request = replica_pb2.RestartRequest(replica_id=replica_id, reason="it is stuck")
            await replica_pb2_grpc.ReplicaStub(to).Restart(request, timeout=10)

    async with serving(coordinator) as server:
        coordinator.assign("one")
        async with replica(server.port, HELD="2") as process:  # nobody would start it again
            await coordinator.hears(READY)
            with pytest.raises(grpc.aio.AioRpcError, match="RELAXD_INSTANCE") as refused:
                await restart(process, "reward-1")
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        coordinator.statuses.clear()
        async with replica(server.port, "--instance", "place", HELD="2", DRAIN_SECONDS="3600") as process:
            await process.says("start one")
            assert coordinator.registered["reward-1"].instance == "place"
            with pytest.raises(grpc.aio.AioRpcError, match="this process is reward-1"):
                await restart(process, "reward-0")
            await restart(process, "reward-1")
            await process.says("stop")  # without a drain
            code, log = await process.ends()
        assert code == RESTART
        assert "told to restart: it is stuck" in log
        async with replica(server.port, "--instance", "place", STOP_HANGS="1") as process:
            await process.says("start one")
            await restart(process, "reward-1")
            assert (await process.ends())[0] == RESTART
