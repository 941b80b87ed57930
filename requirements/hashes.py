"""Write hashes.txt: the digests of the wheels that the images' locks may install, as the package index says.

    python requirements/hashes.py

`make lock` does it, with a pip of 23.2 or newer. A wheel that is built locally, or taken from a folder, isn't in it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from generate import HASHES, IMAGES, TORCH, pinned
from packaging.utils import canonicalize_name

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions of Python of the base images."""
MACHINES = ("x86_64", "aarch64")
LOCAL = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT")
"""Variables of pip that are left out."""
GLIBC = range(41, 4, -1)
"""Minor versions of glibc 2 that wheels may be made for, the newest first, as pip prefers them."""


def report(requirements: str, python: str, machine: str) -> list[dict[str, Any]]:
    """Ask pip what it would install. Raises CalledProcessError."""
    names = [*(f"manylinux_2_{minor}" for minor in GLIBC), "manylinux2014", "manylinux2010", "manylinux1", "linux"]
    platforms = [word for name in names for word in ("--platform", f"{name}_{machine}")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"),
                *("--only-binary", ":all:", "--python-version", python, "--target", folder, *platforms),
                *("--report", str(file), "--requirement", requirements),
            ],
            check=True,
            # This machine's own wheels and limits don't count.
            env={name: value for name, value in os.environ.items() if name not in LOCAL}
            | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        installed: list[dict[str, Any]] = json.loads(file.read_text())["install"]
        return installed


def main() -> None:
    """Write the file."""
    lines = sorted({line for image in IMAGES for line in pinned(image) if line.partition("==")[0] != TORCH})
    names = {canonicalize_name(line.partition("==")[0]): line for line in lines}
    found: dict[str, set[str]] = {line: set() for line in lines}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("\n".join(lines) + "\n")
        requirements.flush()
        for python in PYTHONS:
            for machine in MACHINES:
                for one in report(requirements.name, python, machine):
                    line = names[canonicalize_name(one["metadata"]["name"])]
                    found[line].add(one["download_info"]["archive_info"]["hashes"]["sha256"])
    HASHES.write_text("".join(f"{line} {' '.join(sorted(digests))}\n" for line, digests in found.items()))


if __name__ == "__main__":
    main()
