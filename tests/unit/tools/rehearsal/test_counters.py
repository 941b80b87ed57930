"""Counters of a rehearsal."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import ServiceState, StackState, StateFolder
from relaxd.tools.rehearsal.counters import Counters, current_wait, processor_seconds
from relaxd.tools.rehearsal.engine_numbers import EngineNumbers
from relaxd.v1 import coordinator_pb2 as pb

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
