"""Counters of a rehearsal."""

import subprocess
import sys

import pytest

from relaxd.tools.rehearsal.counters import current_wait, processor_seconds
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
