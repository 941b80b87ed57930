"""Checks of the folders that relaxd writes to."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relaxd.amounts import byte_amount
from relaxd.models import DataError
from relaxd.tools.doctor.finding import Finding, Scope
from relaxd.tools.fitting.fit import written

LITTLE_BYTES, FEWEST_BYTES = 2 << 30, 64 << 20
"""Free disk, in bytes, below which it may soon be full, and below which nothing works."""
FEWEST_FILES = 10_000
"""Number of free inodes below which the disk may soon take no more files."""


def check_disk(scope: Scope) -> Iterator[Finding]:
    """Check that the state folder, the runs' folder and the folder of temporary files can be written and have room."""
    needed = None
    if scope.config is not None:
        try:
            needed = sum(written(scope.config).values())
        except DataError:  # `relaxd config check` names the model that is wrong
            needed = None
    yield folder_finding("state folder", scope.folder.path, "--state DIR")
    yield folder_finding("run folder", scope.runs, "--run.folder DIR", needed)
    yield folder_finding("temporary folder", Path(tempfile.gettempdir()), "export TMPDIR=DIR")


def folder_finding(about: str, folder: Path, other: str, needed: int | None = None) -> Finding:
    """Judge a folder that may not exist yet.

    Args:
        about: name of the folder.
        folder: its path.
        other: how to use another one.
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
    """Return the reason why a folder isn't writable; "" if it is. A folder is created there for a moment."""
    if not folder.is_dir():
        return "is not a folder"
    try:
        Path(tempfile.mkdtemp(prefix=".relaxd-doctor-", dir=folder)).rmdir()
    except OSError as error:
        return f"can't be written: {error.strerror}"
    return ""
