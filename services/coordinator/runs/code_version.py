"""The version of the code that a run is made with."""

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from relaxd import __version__

GIT_SECONDS = 5.0


@cache
def code_version() -> dict[str, Any]:
    """Return the versions of relaxd and Python; in a git checkout also its commit and whether files were changed."""
    version: dict[str, Any] = {"relaxd": __version__, "python": platform.python_version()}
    root = Path(__file__).parents[3]
    if (root / ".git").exists() and (commit := _git(root, "rev-parse", "HEAD")) is not None:
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        version |= {"commit": commit, "uncommitted_changes": changes != ""}
    return version


def _git(root: Path, *words: str) -> str | None:
    """Return the output of a git command; None without git, or if it fails or hangs."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
