"""A cluster with a launcher: the real coordinator, supervisor and launcher; trainer and engines are doubles."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from relaxd.board import Board, stages_for
from relaxd.cli.state import StateFolder
from relaxd.cli.supervisor import Plan, ServiceSpec
from relaxd.config import RunConfig
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2 as scale_pb
from relaxd.v1.replica_pb2 import ROLE_ROLLOUT
from tests.conftest import free_port
from tests.integration.coordinator.cluster import LEASE_SECONDS, ROOT, Cluster

PENDING, CREATING, SYNCING = (
    scale_pb.SCALE_STATE_PENDING,
    scale_pb.SCALE_STATE_CREATING,
    scale_pb.SCALE_STATE_SYNCING,
)
ACTIVE, DRAINING, REMOVING = (
    scale_pb.SCALE_STATE_ACTIVE,
    scale_pb.SCALE_STATE_DRAINING,
    scale_pb.SCALE_STATE_REMOVING,
)
DONE, PARTIAL, FAILED, CANCELLED = (
    scale_pb.SCALE_STATE_DONE,
    scale_pb.SCALE_STATE_PARTIAL,
    scale_pb.SCALE_STATE_FAILED,
    scale_pb.SCALE_STATE_CANCELLED,
)


class ScalingCluster(Cluster):
    """`closed` keeps launched replicas from starting, `fail` makes those end that are named."""

    def __init__(self, folder: Path, redis_url: str, model: Path) -> None:
        super().__init__(folder, redis_url, model)
        self.launcher_port = free_port()
        self.state = StateFolder(folder / "state")
        self.closed = folder / "closed"

    def fail(self, suffix: str) -> Path:
        """Make launched replicas end whose launch id ends so, while the file that is returned exists."""
        path = self.folder / f"fail-{suffix}"
        path.touch()
        return path

    def coordinator(self, name: str = "coordinator", *, launcher: bool = True) -> None:
        flags = ["--port", str(self.port), "--lease-seconds", str(LEASE_SECONDS)]
        flags += ["--launcher", f"127.0.0.1:{self.launcher_port}"] if launcher else []
        self.start(name, "services.coordinator", *flags)

    def supervisor(self, max_restarts: int = 5, **environment: str) -> None:
        """The supervisor, with the launcher and a template for rollout doubles."""
        command = [sys.executable, "-m", "tests.integration.scaling.gated", str(self.folder), "rollout"]
        environment |= {"RELAXD_COORDINATOR": f"127.0.0.1:{self.port}", "RELAXD_REDIS": self.redis_url}
        environment |= {"RELAXD_GRACE_SECONDS": "5", "OMP_NUM_THREADS": "1"}
        launcher = [
            sys.executable,
            "-m",
            "relaxd.cli.launcher",
            str(self.state.path),
            "--port",
            str(self.launcher_port),
        ]
        self.state.create()
        plan = Plan(
            state_folder=self.state.path,
            coordinator=f"127.0.0.1:{self.port}",
            redis=self.redis_url,
            services=[ServiceSpec(name="launcher", role="launcher", command=launcher)],
            templates={"rollout": ServiceSpec(name="", role="rollout", command=command, environment=environment)},
            grace_seconds=5.0,
            max_restarts=max_restarts,
            first_backoff_seconds=0.05,
        )
        self.state.plan.write_text(plan.model_dump_json())
        with (self.folder / "supervisor.log").open("wb") as log:
            command = [sys.executable, "-m", "relaxd.cli.supervisor", str(self.state.plan)]
            self.processes["supervisor"] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def close(self) -> None:
        supervisor = self.processes.get("supervisor")
        if supervisor is not None:
            supervisor.send_signal(signal.SIGCONT)
            for child in psutil.Process(supervisor.pid).children(recursive=True):
                child.resume()
                child.kill()
        super().close()

    # --- asking

    def out(self, replicas: int, **fields: Any) -> scale_pb.ScaleRequest:
        return self.stub.ScaleOut(scale_pb.ScaleOutRequest(replicas=replicas, **fields), timeout=10).request

    def into(self, replicas: int, **fields: Any) -> scale_pb.ScaleRequest:
        return self.stub.ScaleIn(scale_pb.ScaleInRequest(replicas=replicas, **fields), timeout=10).request

    def request(self, request_id: str = "") -> scale_pb.ScaleRequest:
        asked = scale_pb.GetScaleRequestRequest(request_id=request_id)
        return self.stub.GetScaleRequest(asked, timeout=5).request

    def cancel(self, request_id: str = "") -> scale_pb.ScaleRequest:
        asked = scale_pb.CancelScaleRequestRequest(request_id=request_id)
        return self.stub.CancelScaleRequest(asked, timeout=5).request

    def until_scaled(self, *states: int, seconds: float = 40.0) -> scale_pb.ScaleRequest:
        """Wait until the newest request is in one of these states."""
        names = " or ".join(map(scale_pb.ScaleState.Name, states))
        return self.until(names, lambda: (request := self.request()).state in states and request, seconds)

    # --- looking

    def rollouts(self) -> dict[str, pb.ReplicaInfo]:
        """The registered rollout replicas, by id."""
        replicas = self.stub.ListReplicas(pb.ListReplicasRequest(role=ROLE_ROLLOUT), timeout=5).replicas
        return {replica.registration.replica_id: replica for replica in replicas}

    def launched(self) -> dict[str, int]:
        """Process ids of the replicas that the supervisor runs for the launcher."""
        state = self.state.read()
        return {s.name: s.pid or 0 for s in state.services if s.launched} if state else {}

    def ended_run(self) -> pb.Run:
        """Stop the run; check that no group was lost or trained twice."""
        self.stub.StopRun(pb.StopRunRequest(), timeout=5)
        run = self.until_state(pb.RUN_STATE_STOPPED)
        audit(self.redis_url, run)
        return run


def audit(redis_url: str, run: pb.Run) -> None:
    """Conservation, and every group in at most one step; nothing dropped but what the end of the run cut off."""
    config = RunConfig.model_validate_json(run.config_json)
    board = Board(redis_url, run.run_id, stages_for(config), config.board)
    counts = board.counts()
    counts.check()
    trained = Counter(group for entry in board.ledger() for group in entry.plan["groups"])
    assert set(trained.values()) <= {1}, "a group was trained twice"
    assert counts.open == 0
    assert counts.trained == len(trained)
    assert counts.published == counts.trained + counts.dropped
    assert set(counts.dropped_by_reason) <= {"run_ended"}, counts.dropped_by_reason
    board.close()
