"""Checks of this kernel's means to confine answers that are code, and rewards."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence

from relaxd.local.programs import python_path
from relaxd.sandbox import landlock
from relaxd.sandbox.enclosure import Measure
from relaxd.sandbox.limits import ConfinementError, Limits, check
from relaxd.tools.doctor.finding import Finding, Scope

TRIAL_SECONDS = 20.0
SCOPES_VERSION = 6
"""First Landlock version that blocks abstract sockets and signals to other processes."""


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
    """Judge the kernel's version of Landlock."""
    found = f"Landlock {version} and seccomp, on Linux {platform.release()}"
    if version < SCOPES_VERSION:
        found += "; Linux 6.12 would also deny rewards abstract sockets (docs/security.md)"
    return Finding("ok", "sandbox of answers", found)


def enclosure_finding(measures: Sequence[Measure], required: bool) -> Finding:
    """Judge the effective measures of a reward's enclosure. With `required`, no run starts without all of them."""
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
    """Enclose a process and return the effective measures. Raises OSError, ValueError, subprocess.SubprocessError."""
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
