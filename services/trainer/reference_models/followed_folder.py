"""The trainer's run folder, read by other services: waiting for its files, and loading the policy's weights that the
ledger names into a reference.

When a group is scored, it isn't known yet which step will train on it. So every group records the weights that it was
scored with, and the trainer sends it back if its step needs others. This module only has to provide the newest weights.
"""

import logging
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from relaxd.board import Board, BoardUnavailable
from relaxd.roles import REFERENCE
from relaxd.rpc.errors import FailedPrecondition
from relaxd.run_folder import begin_time
from relaxd.waiting import waiting
from services.trainer.batch.step_plan import StepFileError
from services.trainer.loop.checkpoint_folders import weights_after, weights_path
from services.trainer.megatron import TICK_SECONDS

logger = logging.getLogger(__name__)

FOLDER_SECONDS = 10.0
"""Maximum seconds until a run's folder appears: a network file system shows new files late."""
FILE_SECONDS = 60.0
"""Maximum seconds until a committed step's files appear."""
POLL_SECONDS = 0.2


def await_run_folder(folder: Path, role: str, begun: datetime) -> None:
    """Wait until this process sees the run's folder, which the coordinator wrote when the run began.

    Args:
        folder: where the folder should be.
        role: this service's role, for the error.
        begun: time at which the run began or was last restored, from the coordinator. An older copy of the folder, or
            another run's folder, has another time.

    Raises:
        FailedPrecondition: the run's folder isn't visible after FOLDER_SECONDS.
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
    """Wait until a committed step's file or folder exists. Call `still_waiting` with its path every TICK_SECONDS.

    Raises:
        StepFileError: the file is missing after FILE_SECONDS.
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


UNKNOWN = -1
"""Placeholder for the step whose weights are loaded, while this isn't known and the ledger must be read."""


class LedgerWeights:
    """Keeps a reference model at the weights that the ledger names.

    Call `follow` between two passes, so that one version scores a whole group.
    """

    def __init__(
        self,
        board: Board,
        run_folder: Path,
        initial: Path,
        take_over: Callable[[Path], None],
        still_waiting: Callable[[Path], None],
    ) -> None:
        """Start with the weights that the model was loaded with.

        Args:
            board: the run's board.
            run_folder: the run's folder.
            initial: folder of these weights.
            take_over: loads the weights of a folder on all ranks.
            still_waiting: called repeatedly, with the folder, until the folder exists.
        """
        self._board = board
        self._run_folder = run_folder
        self._initial = initial
        self._take_over = take_over
        self._still_waiting = still_waiting
        self._step = UNKNOWN
        self._unavailable = False
        self.weights = ""
        """Name of the weights that the model has now; "" for the initial weights."""

    def follow(self) -> None:
        """Load the weights that the ledger names, if they are new. Keep the current while the board is unavailable.

        Raises:
            StepFileError: the weights aren't in the run's folder.
            ModelError: the weights don't fit the model.
        """
        try:
            step = self._board.last_step()
            entries = self._board.ledger(after_step=step - 1, limit=1) if step not in (0, self._step) else []
        except BoardUnavailable as error:
            if not self._unavailable:
                logger.warning("the ledger can't be read: %s", error)
            self._unavailable, self._step = True, UNKNOWN
            return
        self._unavailable = False
        if step == self._step or (step and not entries):  # the ledger became shorter between the two calls
            return
        name = weights_after(entries[0].plan) if entries else ""
        if name != self.weights:
            folder = weights_path(self._run_folder, name) if name else self._initial
            await_file(folder, REFERENCE, self._still_waiting)
            self._take_over(folder)
            self.weights = name
            logger.info("the reference has taken over the weights %s", name or "that it began with")
        self._step = step
