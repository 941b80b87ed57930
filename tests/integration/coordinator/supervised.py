"""A cluster whose replicas run under the real supervisor, with the real launcher."""

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from relaxd.board import Board, stages_for
from relaxd.config import RunConfig
from relaxd.local.state_folder import StateFolder
from relaxd.local.supervisor import ServiceSpec, StackPlan
from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import LEASE_SECONDS, Cluster
from tests.kit.boards import all_steps
from tests.kit.ports import free_port
from tests.kit.processes import start_python


class SupervisedCluster(Cluster):
    """The test starts the coordinator; the supervisor starts all else."""

    def __init__(self, folder: Path, redis_url: str, model: Path) -> None:
        super().__init__(folder, redis_url, model)
        self.launcher_port = free_port()
        self.state = StateFolder(folder / "state")

    def coordinator(self, name: str = "coordinator", *, launcher: bool = True) -> None:
        flags = ["--port", str(self.port), "--lease-seconds", str(LEASE_SECONDS)]
        flags += ["--launcher", f"127.0.0.1:{self.launcher_port}"] if launcher else []
        self.start(name, "services.coordinator", *flags)

    def environment(self, grace_seconds: float) -> dict[str, str]:
        """Return the environment of this cluster's services."""
        return {
            "RELAXD_COORDINATOR": f"127.0.0.1:{self.port}",
            "RELAXD_REDIS": self.redis_url,
            "RELAXD_GRACE_SECONDS": str(grace_seconds),
            "OMP_NUM_THREADS": "1",
        }

    def start_supervisor(
        self, services: Sequence[ServiceSpec], templates: Mapping[str, ServiceSpec], max_restarts: int
    ) -> None:
        """Start the supervisor with a launcher, these services, and these templates of launched ones."""
        command = [sys.executable, "-m", "relaxd.local.local_launcher", str(self.state.path)]
        command += ["--port", str(self.launcher_port), "--redis", self.redis_url]
        launcher = ServiceSpec(name="launcher", role="launcher", command=command)
        self.state.create()
        plan = StackPlan(
            state_folder=self.state.path,
            coordinator=f"127.0.0.1:{self.port}",
            redis=self.redis_url,
            services=[launcher, *services],
            templates=dict(templates),
            grace_seconds=5.0,
            max_restarts=max_restarts,
            first_backoff_seconds=0.05,
        )
        self.state.plan.write_text(plan.model_dump_json())
        words, log = ("-m", "relaxd.local.supervisor", str(self.state.plan)), self.folder / "supervisor.log"
        self.processes["supervisor"] = start_python(*words, log=log)

    def close(self) -> None:
        supervisor = self.processes.get("supervisor")
        if supervisor is not None and supervisor.poll() is None:
            supervisor.send_signal(signal.SIGSTOP)  # or it would start again what is killed here
            for child in psutil.Process(supervisor.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it died with its parent, which was killed before
                    child.kill()
        super().close()

    def ended_run(self) -> pb.Run:
        """Stop the run; check that no group was lost or trained twice."""
        self.stub.StopRun(pb.StopRunRequest(), timeout=5)
        run = self.until_state(pb.RUN_STATE_STOPPED)
        audit(self.redis_url, run)
        return run


def audit(redis_url: str, run: pb.Run) -> None:
    """Conservation, and every group in at most one step; no drops except at the end of the run."""
    config = RunConfig.model_validate_json(run.config_json)
    board = Board(redis_url, run.run_id, stages_for(config), config.board)
    counts = board.counts()
    counts.check()
    trained = Counter(group for entry in all_steps(board, run.folder) for group in entry.plan["groups"])
    assert set(trained.values()) <= {1}, "a group was trained twice"
    assert counts.open == 0
    assert counts.trained == len(trained)
    assert counts.published == counts.trained + counts.dropped
    assert set(counts.dropped_by_reason) <= {"run_ended"}, counts.dropped_by_reason
    board.close()
