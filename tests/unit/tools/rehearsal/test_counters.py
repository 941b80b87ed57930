"""Counters of a rehearsal."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import ServiceState, StackState, StateFolder
from relaxd.tools.rehearsal.counters import Counters, EngineNumbers, current_wait, processor_seconds
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.scaling_pb2 import AutoscaleDecision, Autoscaler

PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"], check=True)
print("its child has ended", flush=True)
sys.stdin.read()
"""


def test_the_time_of_children_that_have_ended_counts() -> None:
    """Such as that of Redis's child which rewrites the append-only file."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "its child has ended\n"
        assert processor_seconds(process.pid) >= 0.5
        process.communicate("")


def test_the_time_of_a_service_that_was_removed_stays(tmp_path: Path) -> None:
    """Such as that of a rollout replica which the autoscaler removed."""
    folder = StateFolder(tmp_path)
    folder.create()
    state = StackState(pid=1, started=0.0, coordinator="", redis="redis://127.0.0.1:1")
    with (
        folder.locked(),
        CoordinatorClient("127.0.0.1:1") as coordinator,
        subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        counters = Counters(folder, redis.Redis(), coordinator, tmp_path, "run", EngineNumbers([(0.0, 1)]))
        assert process.stdout is not None
        assert process.stdout.readline() == "its child has ended\n"
        folder.write(state.model_copy(update={"services": [ServiceState(name="a", role="rollout", pid=process.pid)]}))
        before = counters.processor_times()["rollout"]
        process.communicate("")
        folder.write(state)
        assert counters.processor_times()["rollout"] == before >= 0.5


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (pb.WAIT_KIND_UNSPECIFIED, ""),
        (pb.WAIT_KIND_HELD_GROUP, "held_group"),
        (pb.WAIT_KIND_STAGE, "stage reward"),
    ],
)
def test_a_wait_is_shown_by_its_kind_and_stage(kind: "pb.WaitKind.ValueType", shown: str) -> None:
    assert current_wait(pb.Run(wait=pb.WaitDetails(current_kind=kind, current_on="reward"))) == shown


OUT = AutoscaleDecision(replicas=2, wanted_replicas=4, reason="busy", request_id="auto-1")
IN = AutoscaleDecision(replicas=4, wanted_replicas=3, reason="idle")


def observed() -> EngineNumbers:
    """Return two replicas, four from 20 s on, three from 40 s on."""
    numbers = EngineNumbers([(0.0, 2)], "on")
    numbers.observe(5.0, Autoscaler(replicas=2))
    numbers.observe(15.0, Autoscaler(replicas=2, decisions=[OUT]))
    numbers.observe(20.0, Autoscaler(replicas=4, decisions=[OUT]))
    numbers.observe(40.0, Autoscaler(replicas=3, decisions=[IN, OUT]))  # the newest first
    return numbers


def test_numbers_over_time() -> None:
    numbers = observed()
    assert numbers.changes == [(0.0, 2), (20.0, 4), (40.0, 3)]
    assert (numbers.last, numbers.most) == (3, 4)


def test_the_mean_number_of_a_window() -> None:
    numbers = observed()
    assert numbers.mean(10.0, 50.0) == pytest.approx((10 * 2 + 20 * 4 + 10 * 3) / 40)
    assert numbers.mean(25.0, 35.0) == 4
    assert numbers.mean(45.0, 60.0) == 3


def test_the_row_shows_numbers_and_decisions() -> None:
    assert observed().row(10.0, 50.0) == (
        "2 for 10 s, 4 for 20 s, 3 for 10 s. Decisions: at 15 s 2 to 4: busy; at 40 s 4 to 3 (not done): idle"
    )
    assert observed().row(1.0, 10.0) == "2 for 9 s, 3 at rest. Decisions: none"


def test_the_row_shows_the_last_decisions_of_many() -> None:
    numbers = EngineNumbers([(0.0, 2)], "dry_run")
    for second in range(12):
        numbers.observe(second, Autoscaler(replicas=2, decisions=(second + 1) * [OUT]))
    assert numbers.row(0.0, 20.0).startswith("2 for 20 s. Decisions: 2 earlier ones; at 2 s 2 to 4: busy; at 3 s")
