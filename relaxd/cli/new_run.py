"""The id and the folder of a new run, checked before anything is started."""

import os
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from relaxd.board.sides.side_base import RESERVED_RUN_ID, RUN_ID, RUN_ID_RULE
from relaxd.client.errors import CliError
from relaxd.run_folder import holds_run


def new_run_id(prefix: str) -> str:
    """Return an id for a run that was given none: the time after a prefix such as the configuration's name.

    A random end tells runs apart that begin in the same second.
    """
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix).strip("-")[:32] or "run"
    return f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_run_id(run_id: str) -> None:
    """Raise CliError unless a run may have this id."""
    if RUN_ID.fullmatch(run_id) is None or run_id == RESERVED_RUN_ID:
        raise CliError(f"--run-id {run_id!r} {RUN_ID_RULE}, and not {RESERVED_RUN_ID!r}")


def free_folder(runs: Path, run_id: str) -> Path:
    """Return the absolute path of a new run's folder. Raises CliError if it is in use, or can't be written."""
    folder = runs.expanduser().resolve() / run_id
    if holds_run(folder):
        raise CliError(
            f"{folder} contains an earlier run: choose another run_id, or move its files away",
            f"relaxd resume {run_id} continues it, --run-id ID names another one",
        )
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise CliError(f"run.folder = {str(runs)!r}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CliError(f"run.folder = {str(runs)!r}: {existing} can't be written by this user")
    return folder
