"""Checks of the host: shared memory, limits of this user, the clock, disks, and the kernel's means to confine code."""

import contextlib
import ctypes
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from relaxd import __version__
from relaxd.local.embedded_redis import machine_memory
from relaxd.local.programs import python_path
from relaxd.models import DataError
from relaxd.replica.gpus import visible_gpus
from relaxd.sandbox import landlock
from relaxd.sandbox.enclosure import Measure
from relaxd.sandbox.limits import ConfinementError, Limits, check
from relaxd.text import byte_amount
from relaxd.tools.doctor import Finding, Scope
from relaxd.tools.fitting.fit import written
from relaxd.waiting import duration

SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 1 << 30
"""Free shared memory, in bytes, below which engines and NCCL may fail to start; Docker's default size is 64 MiB."""
OPEN_FILES, FEWEST_OPEN_FILES = 1024, 256
"""Recommended and minimum value of the limit of open files per process."""
PROCESSES, FEWEST_PROCESSES = 2048, 512
"""Recommended and minimum number of processes and threads that may still start. A service has tens of threads, a rank
on GPUs hundreds."""
CLOCK_SECONDS = 60.0
"""Maximum seconds by which a file's time is ahead of this machine's clock, unless the clock was set back."""
CGROUP = Path("/sys/fs/cgroup")
_UNSYNCHRONISED = 0x40
_STATUS_OFFSET = 40
"""Byte offset of the field `status` in the kernel's struct timex on 64-bit machines."""


def check_system(scope: Scope) -> Iterator[Finding]:
    """Report relaxd's and Python's version, the operating system, cores and memory, for reports of errors."""
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        "ok",
        "system",
        f"relaxd {__version__}, Python {platform.python_version()} ({sys.prefix}), {platform.system()} "
        f"{platform.release()} on {platform.machine()}, {cores} cores, {byte_amount(machine_memory())} of memory",
    )


def check_shared_memory(scope: Scope) -> Iterator[Finding]:
    """Check that /dev/shm has enough free memory, if the machine has GPUs."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        yield shared_memory_finding(0, 0, len(visible_gpus()), error.strerror or str(error))
        return
    yield shared_memory_finding(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, len(visible_gpus()))


def shared_memory_finding(free: int, size: int, gpus: int, error: str = "") -> Finding:
    """Assess shared memory (/dev/shm), given its free and total bytes and the machine's number of GPUs."""
    found = f"{byte_amount(free)} of {byte_amount(size)} are free" if not error else f"it can't be used: {error}"
    if free >= SHARED_BYTES or not (gpus or error):
        return Finding("ok", str(SHARED_MEMORY), found)
    return Finding(
        "warning",
        str(SHARED_MEMORY),
        found,
        f"at least {byte_amount(SHARED_BYTES)}, which NCCL and SGLang share between processes; of a container: "
        "docker run --ipc=host, or --shm-size=16g",
        f"ls -l {SHARED_MEMORY}" if size >= SHARED_BYTES else f"sudo mount -o remount,size=16G {SHARED_MEMORY}",
    )


def check_limits(scope: Scope) -> Iterator[Finding]:
    """Check this user's limits of open files, processes and core dumps."""
    yield open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield processes_finding(*_free_processes())
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    pattern = Path("/proc/sys/kernel/core_pattern")
    yield core_finding(soft, pattern.read_text().strip() if pattern.exists() else "core")


def open_files_finding(soft: int, hard: int) -> Finding:
    """Assess the limit of open files per process, given its soft and hard value."""
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        most = "without a limit" if soft == resource.RLIM_INFINITY else f"{soft} for each process"
        return Finding("ok", "open files", f"{most} (ulimit -n)")
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    enough = wanted >= OPEN_FILES
    return Finding(
        "problem" if soft < FEWEST_OPEN_FILES else "warning",
        "open files",
        f"{soft} for each process (ulimit -n)",
        f"at least {OPEN_FILES}: a service has a connection for each replica"
        + ("" if enough else f"; root must raise the hard limit, {hard} (nofile in /etc/security/limits.conf)"),
        f"ulimit -n {wanted}" if enough else "",
    )


def processes_finding(free: float, by: str) -> Finding:
    """Assess the number of processes and threads that may still start; `by` is the name of the limit on them."""
    if free >= PROCESSES:
        return Finding("ok", "processes", f"{free:.0f} more may start ({by})" if by else "without a limit")
    return Finding(
        "problem" if free < FEWEST_PROCESSES else "warning",
        "processes",
        f"{free:.0f} more processes and threads may start ({by})",
        f"at least {PROCESSES}: services have tens of threads, ranks on GPUs hundreds; of a container: docker run "
        "--pids-limit=32768",
        "ulimit -u unlimited" if by.startswith("ulimit") else "",
    )


def core_finding(soft: int, pattern: str) -> Finding:
    """Assess whether crashes may fill the disk: `soft` is the limit of core dumps in bytes, `pattern` the kernel's
    core_pattern."""
    if not soft:
        return Finding("ok", "core dumps", "none (ulimit -c 0)")
    if pattern.startswith("|"):
        return Finding("ok", "core dumps", f"handed to {pattern[1:].split()[0]}")
    most = "whole" if soft == resource.RLIM_INFINITY else byte_amount(soft)
    return Finding(
        "warning",
        "core dumps",
        f"a process that crashes writes its memory ({most}) to the file {pattern!r}",
        "none, unless you look for a crash: a rank's memory may fill the disk",
        "ulimit -c 0",
    )


def check_clock(scope: Scope) -> Iterator[Finding]:
    """Check that the clock was not set back, and is synchronised if services run on other machines."""
    written, newest = Path(__file__).stat().st_mtime, Path(__file__)
    for path in scope.folder.path.glob("*"):
        with contextlib.suppress(OSError):  # services replace their files meanwhile
            written, newest = max((written, newest), (path.stat().st_mtime, path))
    yield clock_finding(written - time.time(), newest, _is_synchronised(), scope.elsewhere)


def clock_finding(ahead: float, newest: Path, synchronised: bool | None, others: bool) -> Finding:
    """Assess this machine's clock.

    Args:
        ahead: seconds by which the newest file's time is ahead of the clock.
        newest: path of the newest file.
        synchronised: True if the kernel reports that the clock is synchronised, as by NTP; None: unknown.
        others: True if services run on other machines.
    """
    if ahead > CLOCK_SECONDS:
        return Finding(
            "problem",
            "clock",
            f"it was set back: {newest} was written {duration(ahead)} in the future",
            "a clock that doesn't go back: leases and the order of runs depend on it",
            "sudo timedatectl set-ntp true",
        )
    if synchronised is None:
        return Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    if synchronised or not others:
        return Finding("ok", "clock", "synchronised" if synchronised else "not synchronised; one machine needs no more")
    return Finding(
        "warning",
        "clock",
        "nothing synchronises it, and services run on other machines",
        "clocks that agree to a second: times in logs and traces, and TLS certificates, depend on it",
        "sudo timedatectl set-ntp true",
    )


def _free_processes() -> tuple[float, str]:
    """Return the number of processes and threads that can still start, and the limit's name, "" without a limit."""
    free, by = float("inf"), ""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() != 0 and soft != resource.RLIM_INFINITY:  # Linux doesn't limit root's
        user = os.getuid()
        threads = sum(
            one.info["num_threads"] or 0
            for one in psutil.process_iter(["uids", "num_threads"])
            if one.info["uids"] and one.info["uids"].real == user
        )
        free, by = soft - threads, f"ulimit -u {soft}"
    for folder in _cgroups():
        try:
            most = int((folder / "pids.max").read_text())
            left = most - int((folder / "pids.current").read_text())
        except (OSError, ValueError):  # no such limit, or "max"
            continue
        if left < free:
            free, by = left, f"pids.max {most} of {folder}"
    return free, by


def _cgroups() -> list[Path]:
    """Return the folders of the control group (cgroup v2) of this process, and of the groups that contain it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = CGROUP / own.lstrip("/")
    return [one for one in (folder, *folder.parents) if one.is_relative_to(CGROUP)]


def _is_synchronised() -> bool | None:
    """Return True if the kernel reports that its clock is synchronised, as by NTP; None if unknown."""
    times = ctypes.create_string_buffer(256)  # a struct timex of zeros only reads
    if ctypes.CDLL(None).adjtimex(times) < 0:
        return None
    return not int.from_bytes(times.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], sys.byteorder) & _UNSYNCHRONISED


LITTLE_BYTES, FEWEST_BYTES = 2 << 30, 64 << 20
"""Free bytes of a folder's disk below which the doctor reports a warning, and below which a problem."""
FEWEST_FILES = 10_000
"""Number of free inodes of a folder's disk below which the doctor warns."""


def check_disk(scope: Scope) -> Iterator[Finding]:
    """Check that the state folder, the runs' folder and the temporary folder are writable and have free disk space."""
    needed = None
    if scope.config is not None:
        with contextlib.suppress(DataError):  # `relaxd config check` names the model that is wrong
            needed = sum(written(scope.config).values())
    yield folder_finding("state folder", scope.folder.path, "--state DIR")
    yield folder_finding("run folder", scope.runs, "--run.folder DIR", needed)
    yield folder_finding("temporary folder", Path(tempfile.gettempdir()), "export TMPDIR=DIR")


def folder_finding(about: str, folder: Path, other: str, needed: int | None = None) -> Finding:
    """Assess whether a folder, which may not exist yet, is writable and its disk has enough free space.

    Args:
        about: name of the folder.
        folder: its path.
        other: option or command that selects another folder.
        needed: bytes that a run will write there, if known.
    """
    folder = folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if why := _unwritable(existing):
        return Finding("problem", about, f"{folder}: {existing} {why}", "a folder that this user can write", other)
    free, files = shutil.disk_usage(existing).free, os.statvfs(existing).f_favail
    found = f"{folder}: {byte_amount(free)} free"
    if needed is not None:
        found += f", the run will take about {byte_amount(needed)}"
    wanted = LITTLE_BYTES if needed is None else max(needed, FEWEST_BYTES)
    if free < wanted:
        right = f"at least {byte_amount(wanted)}: remove files, or use another folder"
        return Finding("problem" if free < FEWEST_BYTES else "warning", about, found, right, other)
    if 0 < files < FEWEST_FILES:
        right = "more of them: remove small files, or use another folder"
        return Finding("warning", about, f"{folder}: only {files} more files can be made (inodes)", right, other)
    return Finding("ok", about, found)


def _unwritable(folder: Path) -> str:
    """Return why a folder isn't writable, "" if it is. Tests it with a temporary subfolder."""
    if not folder.is_dir():
        return "is not a folder"
    try:
        Path(tempfile.mkdtemp(prefix=".relaxd-doctor-", dir=folder)).rmdir()
    except OSError as error:
        return f"can't be written: {error.strerror}"
    return ""


TRIAL_SECONDS = 20.0
SCOPES_VERSION = 6
"""Lowest Landlock version that can block abstract sockets and signals to other processes."""


def check_sandbox(scope: Scope) -> Iterator[Finding]:
    """Check this kernel's support for the sandbox of answers and the enclosure of rewards."""
    if scope.elsewhere:
        return
    try:
        check(Limits())
        yield answers_finding(landlock.version())
    except ConfinementError as error:
        right = "Linux 5.13 or newer, with landlock in its parameter lsm=, for the reward `code`"
        yield Finding("warning", "sandbox of answers", str(error), right, "cat /sys/kernel/security/lsm")
    try:
        measures = _try_enclosure()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        right = 'a kernel that confines processes, or at worst reward.sandbox = "off"'
        yield Finding("problem", "enclosure of rewards", f"it can't be made: {error}", right)
        return
    required = scope.config is not None and scope.config.reward.sandbox == "required"
    yield enclosure_finding(measures, required)


def answers_finding(version: int) -> Finding:
    """Report the Landlock version that the kernel offers to the sandbox that runs code from answers."""
    found = f"Landlock {version} and seccomp, on Linux {platform.release()}"
    if version < SCOPES_VERSION:
        found += "; Linux 6.12 would also deny rewards abstract sockets (docs/security.md)"
    return Finding("ok", "sandbox of answers", found)


def enclosure_finding(measures: Sequence[Measure], required: bool) -> Finding:
    """Assess which restrictions of reward functions this machine enforces. If `required`, a missing one is a
    problem."""
    missing = [one for one in measures if not one.by and one.name != "user"]
    held = ", ".join(one.name for one in measures if one.by)
    if not missing:
        return Finding("ok", "enclosure of rewards", f"it limits {held}")
    lacks = "; ".join(f"{one.name}: {one.missing}" for one in missing)
    return Finding(
        "problem" if required else "warning",
        "enclosure of rewards",
        f"it limits {held or 'nothing'}, but not {lacks}",
        "limits of network, files, memory, processes and kernel (docs/security.md)",
    )


def _try_enclosure() -> list[Measure]:
    """Enclose a test process as rewards are, and return all restrictions, with the reason for those not enforced.

    Raises OSError, ValueError, subprocess.SubprocessError.
    """
    done = subprocess.run(
        [sys.executable, "-m", "relaxd.sandbox.enclosure"],
        env=os.environ | {"PYTHONPATH": python_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TRIAL_SECONDS,
        check=False,
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return [Measure(**one) for one in json.loads(done.stdout)]
