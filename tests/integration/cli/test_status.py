"""`relaxd status` in a terminal of 80 columns, against a real server: what is well is short, what isn't is said."""

import io
from typing import Any

from rich.console import Console

from relaxd.cli.reading.status_command import print_status
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import ServiceState, StackState
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import coordinator_pb2_grpc, scaling_pb2
from relaxd.v1.health_pb2 import HEALTH_STATE_HEALTHY, HEALTH_STATE_RESTARTING
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, REPLICA_STATE_STARTING
from tests.kit.server_thread import serve_in_thread

WIDTH = 80
NAMES = ("redis", "launcher", "coordinator", "trainer", "rollout", "rollout-2", "reward", "advantage")


class Fleet(coordinator_pb2_grpc.CoordinatorServicer):
    """A run at work on some replicas."""

    def __init__(self, rollouts: int) -> None:
        self.run = pb.Run(run_id="20261122-101112-addition", state=pb.RUN_STATE_RUNNING, step=1234, steps=100000)
        self.run.groups.published, self.run.groups.open, self.run.groups.trained = 98765, 40, 98000
        self.run.waiting_for = "the gate is shut: " + "40 groups are open, " * 5
        self.replicas = []
        for number, role in enumerate(["trainer", "reward", "advantage", *["rollout"] * rollouts]):
            replica = pb.RegisteredReplica()
            replica.registration.role, replica.registration.replica_id = role, f"{role}-{number}"
            replica.registration.address = "10.20.30.40:51234"
            replica.status.state, replica.status.done_groups = REPLICA_STATE_READY, 12345
            self.replicas.append(replica)
            name = f"{role}-{number}"
            self.run.health.add(role=role, instance=name, replica_id=name, state=HEALTH_STATE_HEALTHY)
            self.run.queues.add(stage=role, waiting=123, held=64)

    async def ListReplicas(self, request: Any, context: Any) -> pb.ListReplicasResponse:
        return pb.ListReplicasResponse(replicas=self.replicas)

    async def ListRuns(self, request: Any, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[self.run])

    async def GetRun(self, request: Any, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self.run)

    async def ListScaleRequests(self, request: Any, context: Any) -> scaling_pb2.ListScaleRequestsResponse:
        return scaling_pb2.ListScaleRequestsResponse()


def stack_of(*services: ServiceState) -> StackState:
    return StackState(pid=31999, started=0.0, coordinator="127.0.0.1:50050", services=list(services), redis="redis://")


def status(fleet: Fleet, stack: StackState | None) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=WIDTH)
    add = coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    with (
        serve_in_thread([(add, fleet, "relaxd.v1.Coordinator")]) as port,
        CoordinatorClient(f"127.0.0.1:{port}") as coordinator,
    ):
        print_status(coordinator, stack, console)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH
    return lines


def test_what_is_well_takes_a_line_each() -> None:
    services = [ServiceState(name=name, role=name, phase="running", pid=32000 + i) for i, name in enumerate(NAMES)]
    lines = status(Fleet(rollouts=2), stack_of(*services))
    text = " ".join(lines)
    assert "processes (supervisor 31999): 8 running: redis 32000, launcher 32001" in text
    assert "health of 20261122-101112-addition: 5 of 5 roles and replicas are healthy" in text
    assert "queues of 20261122-101112-addition (waiting+held): trainer 123+64, reward" in text
    assert "the gate is shut: 40 groups are open" in text
    rows = [line.split() for line in lines]
    assert ["rollout-3", "ready", "0", "12345"] in rows
    assert ["20261122-101112-addition", "running", "1234/100000", "40", "98000", "0"] in rows
    assert len(lines) <= 24


def test_what_is_not_well_has_rows_of_its_own() -> None:
    fleet = Fleet(rollouts=2)
    ill = fleet.run.health[3]
    ill.state, ill.restarts, ill.reason = HEALTH_STATE_RESTARTING, 2, "its engine answers no call for 30 s: " * 3
    again = ServiceState(name="reward", role="reward", phase="running", pid=32001, restarts=3)
    failed = ServiceState(name="rollout-2", role="rollout", phase="failed")
    lines = status(fleet, stack_of(again, failed, ServiceState(name="redis", role="redis", phase="running", pid=32000)))
    rows = [line.split() for line in lines]
    assert "processes (supervisor 31999): 1 running: redis 32000" in [line.strip() for line in lines]
    assert ["reward", "running", "32001", "3"] in rows
    assert ["rollout-2", "failed", "0"] in rows
    assert "4 of 5 roles and replicas are healthy" in " ".join(lines)
    assert any(row[:4] == ["rollout", "rollout-3", "restarting", "2"] for row in rows)


def test_of_a_thousand_replicas_those_that_work_are_counted() -> None:
    fleet = Fleet(rollouts=1000)
    fleet.replicas[-1].status.state = REPLICA_STATE_STARTING
    fleet.replicas[-1].status.detail = "loading the model"
    del fleet.run.queues[:]
    lines = status(fleet, None)
    assert len(lines) < 60
    (row,) = [line for line in lines if "rollout-1002" in line]
    assert row.split() == ["rollout-1002", "starting", "0", "12345", "loading", "the", "model"]
    assert "and 973 more: 973 rollout ready" in [line.strip() for line in lines]
