"""Counters of a rehearsal."""

import subprocess
import sys

from relaxd.rehearsal.counters import processor_seconds

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
