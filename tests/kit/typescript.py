"""Examples in TypeScript, built."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.processes import ROOT


def build_example(name: str, proto: str, folder: Path) -> Path:
    """Build an example in a copy, and return it; skips the test where its tools or packages aren't to be had.

    Args:
        name: folder in examples.
        proto: file in protos/relaxd/v1 that it needs.
        folder: where to put the copy.
    """
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("node and npm are not installed")
    copy = folder / name
    shutil.copytree(ROOT / "examples" / name, copy, ignore=shutil.ignore_patterns("node_modules", "build"))
    shutil.copy(ROOT / "protos" / "relaxd" / "v1" / proto, copy)
    install = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund"], cwd=copy, capture_output=True, text=True, timeout=120
    )
    if install.returncode:
        pytest.skip(f"npm can't install the example's packages: {install.stderr[-500:]}")
    build = subprocess.run(["npm", "run", "build"], cwd=copy, capture_output=True, text=True, timeout=120)
    assert build.returncode == 0, build.stdout + build.stderr
    return copy
