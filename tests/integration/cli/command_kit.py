"""The command `relaxd`, run as users run it."""

import subprocess
from pathlib import Path

from tests.kit.processes import ROOT, run_python

EXAMPLE = ROOT / "examples" / "addition.toml"


def relaxd(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "relaxd.cli", *words, cwd=cwd, environment=environment, clean=True)
