"""A run with trackers: real TensorBoard files, and trackers and coordinators that die, while the run goes on."""

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import Cluster

pytest.importorskip("tensorboard", reason="pip install relaxd[trackers]")

RUNNING, STOPPED = pb.RUN_STATE_RUNNING, pb.RUN_STATE_STOPPED
OWN = """
from pathlib import Path
from relaxd.trackers.tracker import Tracker

class Broken(Tracker):
    def start(self, run, edition):
        raise ConnectionError("nobody answers")

class Steps(Tracker):
    def start(self, run, edition):
        self.path = Path(run.settings["options"]["file"])

    def log_step(self, step, numbers):
        with self.path.open("a") as file:
            print(step, file=file)
"""


def curve(run: pb.Run, tag: str) -> list[int]:
    """Return the steps of a curve in a run's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(Path(run.folder) / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in read.Scalars(tag)]


def start_peers(cluster: Cluster) -> None:
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.2")
    cluster.rollout("rollout")


def trackers_process(cluster: Cluster) -> psutil.Process | None:
    coordinator = psutil.Process(cluster.processes["coordinator"].pid)
    for child in coordinator.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if "relaxd.trackers" in child.cmdline():
                return child
    return None


@pytest.mark.slow
def test_a_tracker_that_fails_is_an_alarm_and_costs_no_step(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    broken = f"{tmp_path}/own.py:Broken"
    start_peers(cluster)
    cluster.start_when_up("run", run__steps=6, tracking__trackers=[broken, "tensorboard"], eval__prompts=2)
    run = cluster.until("the alarm", lambda: (run := cluster.run()).alarms and run)
    (alarm,) = run.alarms
    assert alarm.kind == pb.ALARM_KIND_TRACKER
    assert alarm.text.startswith(f"tracker {broken}: ConnectionError: nobody answers (own.py:7, in start)")
    run = cluster.until_state(STOPPED)
    cluster.until("the end of the process", lambda: trackers_process(cluster) is None)
    assert (run.step, curve(run, "train/reward_mean")) == (6, [1, 2, 3, 4, 5, 6])
    assert curve(run, "eval/reward") == [0, 6]
    assert cluster.log("coordinator").count(f"run run goes on without tracker {broken}") == 1


@pytest.mark.slow
def test_curves_have_each_step_once_though_trackers_and_coordinator_were_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    steps = tmp_path / "steps"
    start_peers(cluster)
    own = {"tracking__trackers": ["tensorboard", f"{tmp_path}/own.py:Steps"], "tracking.options__file": str(steps)}
    cluster.start_when_up("run", run__steps=14, **own)
    cluster.until_step(2)
    first = cluster.until("the trackers' process", lambda: trackers_process(cluster))
    first.send_signal(signal.SIGKILL)
    second = cluster.until("another one", lambda: (new := trackers_process(cluster)) and new != first and new)
    cluster.until_step(5)
    cluster.kill("coordinator")
    second.wait(60)  # it ends with the coordinator
    cluster.coordinator()
    run = cluster.until_state(STOPPED)
    cluster.until("the end of the process", lambda: trackers_process(cluster) is None)
    assert curve(run, "train/reward_mean") == list(range(1, 15))
    assert list(dict.fromkeys(steps.read_text().split())) == [str(step) for step in range(1, 15)]
    assert "tracker their process: was killed by signal 9" in cluster.log("coordinator")
