"""A cluster under the real supervisor, with the real coordinator and launcher; trainer and engines are doubles."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from relaxd.local.state_folder import ServiceState
from relaxd.local.supervisor import ServiceSpec
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import health_pb2
from tests.integration.coordinator.supervised import SupervisedCluster

HEALTHY = health_pb2.HEALTH_STATE_HEALTHY
RESTARTING, REBUILDING = health_pb2.HEALTH_STATE_RESTARTING, health_pb2.HEALTH_STATE_REBUILDING
FAILED = health_pb2.HEALTH_STATE_FAILED

QUICK: dict[str, Any] = {
    "health__stuck_seconds": 5.0,
    "health__restart_timeout_seconds": 120.0,
    "health__first_backoff_seconds": 0.2,
    # What a replica keeps by itself comes on top.
    "weights__timeout_seconds": 2.0,
    "weights__connect_timeout_seconds": 2.0,
    "trainer__collective_timeout_seconds": 1.0,
    "reward__timeout_seconds": 1.0,
    "board__lease_seconds": 300.0,  # the board alone would wait for long
}
"""Settings with limits of seconds."""


class HealthCluster(SupervisedCluster):
    """Doubles under the supervisor, with faults on command."""

    def supervisor(self, counts: Mapping[str, int], max_restarts: int = 5) -> None:
        """Start `counts` replicas of each role."""
        environment = {**self.environment(grace_seconds=2), "PEER_STEP_SECONDS": "0.2"}
        command = [sys.executable, "-m", "tests.integration.health.doubles", str(self.folder)]
        services = [
            ServiceSpec(name=f"{role}-{number}", role=role, command=[*command, role], environment=environment)
            for role, count in counts.items()
            for number in range(1, count + 1)
        ]
        self.start_supervisor(services, {}, max_restarts)

    def begin(self, *, max_restarts: int = 5, rollouts: int = 1, **overrides: Any) -> None:
        """One replica of each role (`rollouts` of that one), and an endless run that has committed a step."""
        self.supervisor({"trainer": 1, "rollout": rollouts, "reward": 1, "advantage": 1}, max_restarts)
        self.until("the coordinator", lambda: self.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
        self.start_run("run", **{"run__steps": 100000, **QUICK, **overrides})
        self.until_step(1)

    # --- going wrong

    def fault(self, fault: str, instance: str, replica_id: str = "") -> Path:
        """Command a fault (see doubles.py); removing the file ends it."""
        path = self.folder / f"{fault}-{instance}"
        path.write_text(replica_id)
        return path

    def service(self, name: str) -> ServiceState:
        """Return the supervisor's entry of a service."""
        state = self.until("the supervisor", self.state.read)
        return next(service for service in state.services if service.name == name)

    def process(self, name: str) -> psutil.Process:
        """Return the current process of a service."""
        return psutil.Process(self.service(name).pid)

    # --- looking

    def health(self, name: str) -> health_pb2.Health:
        """Return the health of a replica (by instance) or a role (by name)."""
        for one in self.run().health:
            if name == (one.instance or one.role):
                return one
        return health_pb2.Health()

    def info(self, replica_id: str) -> pb.RegisteredReplica:
        """Return the coordinator's entry of a replica."""
        replicas = self.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
        return next((one for one in replicas if one.registration.replica_id == replica_id), pb.RegisteredReplica())

    def events(self) -> list[health_pb2.RunEvent]:
        """Return all health events of the run."""
        request = pb.WatchRunRequest(resume_token=f"{self.run().step}-0", max_seconds=0.1)
        return [event for answer in self.stub.WatchRun(request, timeout=30) for event in answer.events]

    def until_event(self, instance: str, state: int, text: str = "") -> health_pb2.RunEvent:
        """Wait for an event of a replica (by instance) or a role (by name)."""

        def look() -> health_pb2.RunEvent | None:
            for event in self.events():
                subject = event.instance or event.role
                if subject == instance and event.state == state and text in event.text:
                    return event
            return None

        name = health_pb2.HealthState.Name(state)
        return self.until(f"{instance} {name} {text!r}", look)

    def goes_on(self) -> None:
        """Wait until two more steps are committed."""
        self.until_step(self.run().step + 2)
