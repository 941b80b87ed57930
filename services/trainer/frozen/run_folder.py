"""The trainer's run folder, for a service that follows the ledger."""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from relaxd.rpc.errors import FailedPrecondition
from relaxd.run_folder import begin_time
from relaxd.waiting import waiting
from services.trainer.batch.step_file import StepFileError
from services.trainer.megatron.tick import TICK_SECONDS

FOLDER_SECONDS = 10.0
"""Seconds that a run's folder may take to appear: a network file system shows new files late."""
FILE_SECONDS = 60.0
"""Seconds that a committed step's files may take to appear."""
POLL_SECONDS = 0.2


def await_run_folder(folder: Path, role: str, begun: datetime) -> None:
    """Wait until this process sees the folder of its run: the coordinator wrote there when this run began.

    Args:
        folder: where the folder should be.
        role: who looks, for the error.
        begun: when the run began, or was restored last, as the coordinator says. A copy of the folder that was made
            before, or another run at this path, has another time.

    Raises:
        FailedPrecondition: it isn't there after FOLDER_SECONDS.
    """
    deadline = time.monotonic() + FOLDER_SECONDS
    with waiting(f"the run's folder {folder}", on="the file system"):
        while (found := begin_time(folder)) != begun:
            if time.monotonic() > deadline:
                problem = (
                    f"{folder} has no run.json and config.json here"
                    if found is None
                    else f"the run in {folder} here began at {found.isoformat()}, this one at {begun.isoformat()}, so "
                    "that it is an old copy or another run's"
                )
                raise FailedPrecondition(
                    f"the {role} doesn't see the run's folder: {problem}. It reads what the trainer writes there: "
                    "mount the folder that coordinator and trainer have at the same path"
                )
            time.sleep(POLL_SECONDS)  # named: above


def await_file(path: Path, role: str, still_waiting: Callable[[Path], None]) -> None:
    """Wait until what a committed step has written is there; call `still_waiting` with it every TICK_SECONDS.

    Raises:
        StepFileError: it isn't there after FILE_SECONDS.
    """
    deadline = time.monotonic() + FILE_SECONDS
    with waiting(f"{path}, of a committed step", on="the file system"):
        while not path.exists():
            if time.monotonic() > deadline:
                raise StepFileError(
                    f"{path} isn't there, {FILE_SECONDS:g} s after its step was committed: either this {role} doesn't "
                    "see the run's folder as the trainer does, which needs the same folder mounted at the same path, "
                    "or it was removed"
                )
            still_waiting(path)
            time.sleep(TICK_SECONDS)  # named: above
