"""Limits, shared memory and clock, judged as tables; then those of this machine."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from relaxd.local.state_folder import StateFolder
from relaxd.tools.doctor import Scope
from relaxd.tools.doctor.host import (
    check_clock,
    check_limits,
    check_shared_memory,
    check_system,
    clock_finding,
    core_finding,
    folder_finding,
    open_files_finding,
    processes_finding,
    shared_memory_finding,
)
from tests.kit.cases import each

INFINITY = resource.RLIM_INFINITY
MIB, GIB = 1 << 20, 1 << 30


@each(
    ("soft", "hard", "level", "command"),
    [
        (INFINITY, INFINITY, "ok", ""),
        (1024, 4096, "ok", ""),
        (1023, 524288, "warning", "ulimit -n 65536"),
        (512, 4096, "warning", "ulimit -n 4096"),
        (255, INFINITY, "problem", "ulimit -n 65536"),
        (128, 256, "problem", ""),
    ],
)
def test_open_files(soft: int, hard: int, level: str, command: str) -> None:
    finding = open_files_finding(soft, hard)
    assert (finding.level, finding.how) == (level, command)
    assert ("root must raise the hard limit, 256" in finding.right) == (hard == 256)


@pytest.mark.parametrize(
    ("free", "by", "level", "command"),
    [
        (float("inf"), "", "ok", ""),
        (2048, "ulimit -u 4096", "ok", ""),
        (2047, "ulimit -u 4096", "warning", "ulimit -u unlimited"),
        (100, "pids.max 512 of /sys/fs/cgroup", "problem", ""),
        (-3, "ulimit -u 10", "problem", "ulimit -u unlimited"),
    ],
)
def test_processes(free: float, by: str, level: str, command: str) -> None:
    finding = processes_finding(free, by)
    assert (finding.level, finding.how) == (level, command)
    assert by in finding.found


@pytest.mark.parametrize(
    ("soft", "pattern", "level"),
    [(0, "core", "ok"), (INFINITY, "|/usr/lib/systemd/systemd-coredump %P", "ok"), (INFINITY, "core.%p", "warning")],
)
def test_core_dumps(soft: int, pattern: str, level: str) -> None:
    assert core_finding(soft, pattern).level == level


@pytest.mark.parametrize(
    ("free", "size", "gpus", "error", "level", "command"),
    [
        (64 * MIB, 64 * MIB, 0, "", "ok", ""),
        (64 * MIB, 64 * MIB, 2, "", "warning", "sudo mount -o remount,size=16G /dev/shm"),
        (2 * MIB, 8 * GIB, 2, "", "warning", "ls -l /dev/shm"),
        (8 * GIB, 8 * GIB, 8, "", "ok", ""),
        (0, 0, 0, "No such file or directory", "warning", "sudo mount -o remount,size=16G /dev/shm"),
    ],
)
def test_shared_memory(free: int, size: int, gpus: int, error: str, level: str, command: str) -> None:
    finding = shared_memory_finding(free, size, gpus, error)
    assert (finding.level, finding.how) == (level, command)


@pytest.mark.parametrize(
    ("ahead", "synchronised", "others", "level", "told"),
    [
        (-5.0, True, True, "ok", "synchronised"),
        (-5.0, False, False, "ok", "not synchronised; one machine needs no more"),
        (-5.0, False, True, "warning", "nothing synchronises it"),
        (50.0, True, True, "ok", "synchronised"),
        (90_000.0, True, False, "problem", "state.json was written"),
    ],
)
def test_clock(ahead: float, synchronised: bool, others: bool, level: str, told: str) -> None:
    finding = clock_finding(ahead, Path(".relaxd/state.json"), synchronised, others)
    assert finding.level == level
    assert told in finding.found


def test_a_folder_must_be_writable_and_have_room(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert folder_finding("run folder", tmp_path / "new" / "runs", "--run.folder DIR", 1000).level == "ok"
    blocked = folder_finding("run folder", tmp_path / "file" / "runs", "--run.folder DIR")
    assert (blocked.level, blocked.how) == ("problem", "--run.folder DIR")
    assert f"{tmp_path}/file is not a folder" in blocked.found
    read_only = folder_finding("state folder", Path("/proc/relaxd"), "--state DIR")
    assert read_only.level == "problem"
    short = folder_finding("run folder", tmp_path, "--run.folder DIR", 10**18)
    assert short.level == "warning"
    assert "the run will take about 1e+06 TB" in short.found


def test_this_machine_is_described(tmp_path: Path) -> None:
    scope = Scope(folder=StateFolder(tmp_path / ".relaxd"))
    for check in (check_system, check_shared_memory, check_limits, check_clock):
        assert all(finding.about and finding.found for finding in check(scope))


def test_limits_are_those_of_the_process(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from relaxd.tools.doctor import Scope\n"
        "from relaxd.tools.doctor.host import check_limits\n"
        "from relaxd.local.state_folder import StateFolder\n"
        "print([(one.about, one.level) for one in check_limits(Scope(folder=StateFolder(Path('x'))))])"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    done = subprocess.run([sys.executable, "-c", program], preexec_fn=limit, capture_output=True, text=True, check=True)
    assert "('open files', 'problem')" in done.stdout
