"""Names and folders of the weights that a reference service takes over (`roles.reference.refresh_every`).

reference/step-000050.1            Hugging Face folder of the weights after step 50, by the trainer of term 1
reference/step-000100.1.partial    being written

A folder is complete before its step is committed, and the ledger says which one is in force. So nobody reads one of a
trainer that died before it could commit, or that was replaced.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relaxd.roles import REFERENCE
from services.trainer.batch.disk_files import sync

FOLDER = "reference"
"""Subfolder of the run's folder for the reference's weights."""
NAME = re.compile(r"step-(\d+)\.(\d+)")
"""Prefix of a folder's name, followed by step and term. An unfinished one ends with ".partial"."""


def weights_after(plan: Mapping[str, Any]) -> str:
    """Return the name of the reference's weights after a committed step, by its plan; "": the initial ones."""
    if REFERENCE in plan.get("refreshed", ()):
        return f"step-{plan['step']:06d}.{plan['term']}"
    return str(plan.get("reference", ""))


def weights_path(run_folder: Path, name: str) -> Path:
    """Return the folder of weights."""
    return run_folder / FOLDER / name


def sync_weights(folder: Path) -> None:
    """Wait until weights are on disk. Raises OSError."""
    for path in (*folder.iterdir(), folder, folder.parent):
        sync(path)


def remove_older(run_folder: Path, name: str, kept: str) -> None:
    """Remove the weights older than those of `name`, except `kept`. Raises OSError.

    A trainer that was replaced and doesn't know it yet removes none of its successor's.
    """
    for path in (run_folder / FOLDER).iterdir():
        if path.name != kept and (found := NAME.match(path.name)) and _age(found) < _age(NAME.match(name)):
            shutil.rmtree(path)


def _age(name: re.Match[str] | None) -> tuple[int, int]:
    assert name is not None
    return int(name[1]), int(name[2])
