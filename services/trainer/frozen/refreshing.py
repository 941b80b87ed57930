"""Rank 0 of a reference that takes over the policy's weights: the ledger says which ones.

Which step will train on a group isn't known when the group is scored. So every group says what weights it was scored
with, and the trainer sends it back if a step needs others. All that is left to do here is to have the newest.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from relaxd.board import Board, BoardUnavailable
from relaxd.roles import REFERENCE
from services.trainer.batch.reference_weights import weights_after, weights_path
from services.trainer.frozen.run_folder import await_file

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""The step whose weights are served is not known: read the ledger."""


class LedgerWeights:
    """Takes over the weights that the ledger names. Used between two passes, so that a group has one version."""

    def __init__(
        self,
        board: Board,
        run_folder: Path,
        initial: Path,
        take_over: Callable[[Path], None],
        still_waiting: Callable[[Path], None],
    ) -> None:
        """Begin with the initial weights.

        Args:
            board: the run's board.
            run_folder: the run's folder.
            initial: folder of the weights that the model was loaded with.
            take_over: loads a folder on all ranks.
            still_waiting: called again and again while a folder isn't there yet.
        """
        self._board = board
        self._run_folder = run_folder
        self._initial = initial
        self._take_over = take_over
        self._still_waiting = still_waiting
        self._step = UNKNOWN
        self._unavailable = False
        self.weights = ""
        """Name of the weights that the model has; "": the initial ones."""

    def follow(self) -> None:
        """Take over other weights if the ledger names others. While the board is unavailable, keep these.

        Raises:
            StepFileError: they aren't in the run's folder.
            ModelError: they don't fit the model.
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
