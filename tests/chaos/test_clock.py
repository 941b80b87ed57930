"""The clock that chaos sets: a process sees what the file says at each moment, in all of Python's calls."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

CLOCK = Path(__file__).parent / "clock"
PROGRAM = """
import sys, time
from datetime import UTC, datetime
for line in sys.stdin:
    print(time.time(), time.time_ns() / 1e9, datetime.now(UTC).timestamp(), datetime.now().timestamp(), flush=True)
"""

KIND = "from datetime import datetime; print(datetime.__basicsize__, datetime.__flags__, datetime.__mro__)"


def test_a_process_has_the_clock_that_its_file_says(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_bytes(struct.pack("d", 0.0))
    environment = os.environ | {"PYTHONPATH": str(CLOCK), "CHAOS_CLOCK": str(file)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for offset in (0.0, -2 * 86400.0, 3600.0, 0.0):
            file.write_bytes(struct.pack("d", offset))
            before = time.time()
            process.stdin.write("now\n")
            process.stdin.flush()
            times = [float(word) - offset for word in process.stdout.readline().split()]
            assert len(times) == 4
            assert all(before - 0.01 <= one <= time.time() + 0.01 for one in times), (offset, times)
        process.stdin.close()


def test_extensions_find_the_datetime_that_they_derive_from(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_bytes(struct.pack("d", 0.0))
    program = (sys.executable, "-c", KIND)
    environment = os.environ | {"PYTHONPATH": str(CLOCK), "CHAOS_CLOCK": str(file)}
    assert subprocess.check_output(program, env=environment) == subprocess.check_output(program)
