"""Check that the interpreter of a run's trackers has their packages."""

import subprocess
import sys
from collections.abc import Iterator

from relaxd.config import TrackingConfig
from relaxd.tools.doctor.finding import Finding, Scope
from relaxd.tools.doctor.packages import Requirement, requirements

PACKAGES = ("tensorboard", "wandb", "clearml", "trackio")
"""Bundled trackers that need a package of the same name."""
START_SECONDS = 10.0
"""Maximum seconds for an interpreter to answer."""
MIN_PYTHON = (3, 11)
_LOOK = """
import importlib.util, sys
sys.path.pop(0)  # the current folder may have a folder of a tracker's name
print(*sys.version_info[:2], *(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
"""Program that prints the interpreter's version, and the missing ones of some packages."""


def check_trackers(scope: Scope) -> Iterator[Finding]:
    """Check the interpreter and the packages of the trackers of the run in question."""
    if scope.config is not None and scope.config.tracking.trackers and not scope.elsewhere:
        yield trackers_finding(scope.config.tracking)


def trackers_finding(tracking: TrackingConfig) -> Finding:
    """Judge the interpreter of a run's trackers."""
    about, python = "trackers", tracking.python or sys.executable
    wanted = [name for name in tracking.trackers if name in PACKAGES]
    right = f"an interpreter with {', '.join(wanted)}" if wanted else "an interpreter"
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, *wanted], capture_output=True, text=True, timeout=START_SECONDS, check=True
        )
        major, minor, *missing = done.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        found = f"{python} (tracking.python) can't be used: {error}"
        return Finding("problem", about, found, right, "set tracking.python to a Python 3.11 or newer")
    if (int(major), int(minor)) < MIN_PYTHON:
        found = f"{python} (tracking.python) is Python {major}.{minor}"
        return Finding("problem", about, found, "Python 3.11 or newer", "set tracking.python to one")
    if missing:
        known = {one.name: one for one in requirements().get("trackers", ())}
        packages = " ".join(f"'{known.get(name, Requirement(name, ''))}'" for name in missing)
        whose = "" if tracking.python else ", or set tracking.python to an interpreter that has it"
        how = f"{python} -m pip install {packages}{whose}"
        return Finding("problem", about, f"{python} has no {', '.join(missing)}", right, how)
    return Finding("ok", about, f"{python} has what {', '.join(tracking.trackers)} need")
