"""A cluster under the real supervisor, with the real coordinator and launcher; trainer and engines are doubles."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from relaxd.cli.state import ServiceState, StateFolder
from relaxd.cli.supervisor import Plan, ServiceSpec
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import health_pb2
from relaxd.v1.replica_pb2 import Role
from tests.conftest import free_port
from tests.integration.coordinator.cluster import LEASE_SECONDS, ROOT, Cluster
from tests.integration.scaling.kit import audit

HEALTHY, SUSPECT = health_pb2.HEALTH_STATE_HEALTHY, health_pb2.HEALTH_STATE_SUSPECT
RESTARTING, REBUILDING = health_pb2.HEALTH_STATE_RESTARTING, health_pb2.HEALTH_STATE_REBUILDING
FAILED = health_pb2.HEALTH_STATE_FAILED

QUICK: dict[str, Any] = {
    "health__stuck_seconds": 2.0,
    "health__restart_timeout_seconds": 30.0,
    "health__first_backoff_seconds": 0.2,
    # What a replica keeps by itself comes on top.
    "weights__timeout_seconds": 2.0,
    "weights__connect_timeout_seconds": 2.0,
    "trainer__collective_timeout_seconds": 1.0,
    "reward__timeout_seconds": 1.0,
    "board__lease_seconds": 300.0,  # the board alone would wait for long
}
"""Settings under which things happen in seconds."""


class HealthCluster(Cluster):
    """Everything but the coordinator is the supervisor's."""

    def __init__(self, folder: Path, redis_url: str, model: Path) -> None:
        super().__init__(folder, redis_url, model)
        self.launcher_port = free_port()
        self.state = StateFolder(folder / "state")

    def coordinator(self, name: str = "coordinator") -> None:
        flags = ["--port", str(self.port), "--lease-seconds", str(LEASE_SECONDS)]
        self.start(name, "services.coordinator", *flags, "--launcher", f"127.0.0.1:{self.launcher_port}")

    def supervisor(self, counts: Mapping[str, int], max_restarts: int = 5) -> None:
        """Start `counts` replicas of each role."""
        common = {
            "RELAXD_COORDINATOR": f"127.0.0.1:{self.port}",
            "RELAXD_REDIS": self.redis_url,
            "RELAXD_GRACE_SECONDS": "2",
            "OMP_NUM_THREADS": "1",
            "PEER_STEP_SECONDS": "0.2",
        }
        launcher = [sys.executable, "-m", "relaxd.cli.launcher", str(self.state.path)]
        services = [
            ServiceSpec(name="launcher", role="launcher", command=[*launcher, "--port", str(self.launcher_port)])
        ]
        for role, count in counts.items():
            command = [sys.executable, "-m", "tests.integration.health.doubles", str(self.folder), role]
            services += [
                ServiceSpec(
                    name=f"{role}-{number}",
                    role=role,
                    command=command,
                    environment=common,
                )
                for number in range(1, count + 1)
            ]
        self.state.create()
        plan = Plan(
            state_folder=self.state.path,
            coordinator=f"127.0.0.1:{self.port}",
            redis=self.redis_url,
            services=services,
            grace_seconds=5.0,
            max_restarts=max_restarts,
            first_backoff_seconds=0.05,
        )
        self.state.plan.write_text(plan.model_dump_json())
        with (self.folder / "supervisor.log").open("wb") as log:
            command = [sys.executable, "-m", "relaxd.cli.supervisor", str(self.state.plan)]
            self.processes["supervisor"] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def begin(self, *, max_restarts: int = 5, rollouts: int = 1, **overrides: Any) -> None:
        """One replica of each role (`rollouts` of that one), and a run without an end that has done a step."""
        self.supervisor({"trainer": 1, "rollout": rollouts, "reward": 1, "advantage": 1}, max_restarts)
        self.until("the coordinator", lambda: self.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None, 120)
        self.start_run("run", **{"run__steps": 100000, **QUICK, **overrides})
        self.until_step(1, 120)

    def close(self) -> None:
        supervisor = self.processes.get("supervisor")
        if supervisor is not None and supervisor.poll() is None:
            supervisor.send_signal(signal.SIGSTOP)  # or it would start again what is killed here
            for child in psutil.Process(supervisor.pid).children(recursive=True):
                child.kill()
        super().close()

    # --- going wrong

    def fault(self, fault: str, instance: str, replica_id: str = "") -> Path:
        """Command a fault (see doubles.py); removing the file ends it."""
        path = self.folder / f"{fault}-{instance}"
        path.write_text(replica_id)
        return path

    def service(self, name: str) -> ServiceState:
        """What the supervisor says of a service."""
        state = self.until("the supervisor", self.state.read)
        return next(service for service in state.services if service.name == name)

    def process(self, name: str) -> psutil.Process:
        """The process of a service now."""
        return psutil.Process(self.service(name).pid)

    def remove(self, name: str) -> None:
        """End a service for good: its supervisor, stopped, can't start it again. Only once, and for the last fault."""
        process = self.process(name)
        self.send("supervisor", signal.SIGSTOP)
        process.terminate()

    # --- looking

    def health(self, name: str) -> health_pb2.Health:
        """Of a replica (its instance), or of a role (its name)."""
        for one in self.run().health:
            if name == (one.instance or Role.Name(one.role).removeprefix("ROLE_").lower()):
                return one
        return health_pb2.Health()

    def info(self, replica_id: str) -> pb.ReplicaInfo:
        """What the coordinator knows of a replica."""
        replicas = self.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
        return next((one for one in replicas if one.registration.replica_id == replica_id), pb.ReplicaInfo())

    def events(self) -> list[health_pb2.RunEvent]:
        """All that happened, from the beginning."""
        request = pb.WatchRunRequest(resume_token=f"{self.run().step}-0", max_seconds=0.1)
        return [event for answer in self.stub.WatchRun(request, timeout=30) for event in answer.events]

    def until_event(self, instance: str, state: int, text: str = "", seconds: float = 60.0) -> health_pb2.RunEvent:
        """Wait for an event of a replica, or of a role (its name)."""

        def look() -> health_pb2.RunEvent | None:
            for event in self.events():
                subject = event.instance or Role.Name(event.role).removeprefix("ROLE_").lower()
                if subject == instance and event.state == state and text in event.text:
                    return event
            return None

        name = health_pb2.HealthState.Name(state)
        return self.until(f"{instance} {name} {text!r}", look, seconds)

    def goes_on(self, seconds: float = 60.0) -> None:
        """Two more steps are committed."""
        self.until_step(self.run().step + 2, seconds)

    def ended_run(self) -> pb.Run:
        """Stop the run; check that no group was lost or trained twice."""
        self.stub.StopRun(pb.StopRunRequest(), timeout=5)
        run = self.until_state(pb.RUN_STATE_STOPPED, 60)
        audit(self.redis_url, run)
        return run
