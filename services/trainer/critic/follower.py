"""Rank 0 of a critic: trains on each step once it is committed, in order and once, and gives values meanwhile.

Steps come first, so that values are of a critic that has seen every step there was when they were computed. The ledger
says what is committed, and the weights are those of a step: a critic that dies loads its newest checkpoint and repeats
the steps after it from their files, as a trainer does.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from relaxd.board import BoardUnavailable, Column, CriticOrders, LedgerEntry
from relaxd.config import RunConfig
from relaxd.roles import CRITIC
from services.trainer.batch.step_file import step_file_path
from services.trainer.critic.commands import CriticRank, TrainStep
from services.trainer.frozen.logprobs import ModelStage
from services.trainer.frozen.run_folder import await_file
from services.trainer.frozen.stage_rank import world_config
from services.trainer.loop.checkpoints import Answer, Checkpoints
from services.trainer.megatron.rank_channel import TICK_SECONDS

RETRY_SECONDS = 5.0
"""Between two tries to write a checkpoint that the trainer asked for."""

logger = logging.getLogger(__name__)


class Superseded(RuntimeError):
    """Another critic follows the run."""


class LedgerShorter(RuntimeError):
    """The ledger lacks a step on which the critic has been trained: it was restored from older files."""


class Follower:
    """Follows the ledger of a run."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        rank: CriticRank,
        stage: ModelStage,
        report: Callable[[str], None],
    ) -> None:
        """Begin a critic term. `report` tells the service what goes on. Raises RunMissing, BoardUnavailable."""
        self._rank = rank
        rank.channel.disk.report = self._tell_of_disk
        self._board = rank.board
        self._stage = stage
        self._report = report
        self._term = self._board.new_critic_term()
        own = config.model_copy(update={"trainer": world_config(config, CRITIC)})
        self._checkpoints = Checkpoints(own, run_id, self._term, rank)
        rank.progress = self._between_rounds
        self._asked: tuple[int, bool] | None = None
        """The last checkpoint that the trainer asked for and that was begun: its step, and whether it is kept."""
        self._answer: Answer | None = None
        self._asked_at = 0.0
        self._detail = ""
        self._unavailable = False

    def restore(self) -> None:
        """Load the newest checkpoint. Raises CheckpointError (it doesn't fit this critic), BoardUnavailable."""
        self._tell("looking for a checkpoint")
        self._checkpoints.restore()

    def run(self) -> None:
        """Follow the run. Never returns.

        Raises:
            Superseded: another critic has begun to follow it.
            LedgerShorter: the ledger has lost steps.
            TooManySkippedUpdates: too many updates in a row weren't finite.
            StepFileError: a step's file isn't there, or is another than the ledger says.
        """
        started = False
        while True:
            if self._train_next():
                continue
            if not started:
                self._stage.worker.start()
                started = True
            self._tell(self._problem())
            self._stage.run(TICK_SECONDS)
            self._rank.channel.tick()

    def state(self) -> dict[str, Column]:
        """Return what the critic is, for the column CRITIC_STATE."""
        learner = self._rank.learner
        return {"step": learner.step, "metrics": learner.metrics}

    def _train_next(self) -> bool:
        """Train on the next step, if it is committed. Return whether there was anything to do."""
        self._checkpoints.complete_if_written()
        try:
            following = self._rank.steps(self._rank.learner.step, 1)
            last = following[0].step if following else self._board.last_step()
            # After the ledger: the trainer asks for a checkpoint before it commits the next step.
            orders = self._board.critic_orders()
        except BoardUnavailable as error:
            if not self._unavailable:
                logger.warning("the critic waits for the board, which is unavailable: %s", error)
            self._unavailable = True
            self._tell("waiting for the board")
            self._rank.channel.tick()
            time.sleep(TICK_SECONDS)
            return True
        self._unavailable = False
        if orders.term > self._term:
            raise Superseded(
                f"this critic, of term {self._term}, ends: another one, of term {orders.term}, took over while this "
                "one was out of touch. A run has one critic"
            )
        if last < self._rank.learner.step:
            raise LedgerShorter(
                f"the ledger ends at step {last}, but this critic has trained on step {self._rank.learner.step}: the "
                "next one starts from a checkpoint of a step in the ledger"
            )
        self._take_orders(orders)
        # Also one that was wanted while the one before was written.
        self._checkpoints.begin_if_wanted(self._rank.learner.step)
        if not following:
            return False
        (entry,) = following
        self._train(entry)
        return True

    def _take_orders(self, orders: CriticOrders) -> None:
        """Request the checkpoint that the trainer asked for, once this is the critic of its step.

        One that can't be written is tried again until there is another step: a run that ends waits for it.
        """
        step = self._rank.learner.step
        if step not in (orders.checkpoint, orders.kept):
            return
        asked, now = (step, step == orders.kept), time.monotonic()
        failed = self._problem() and now - self._asked_at > RETRY_SECONDS
        if asked != self._asked or failed:
            self._asked, self._asked_at = asked, now
            self._answer = self._checkpoints.request(rotate=step != orders.kept)

    def _problem(self) -> str:
        """Return why the checkpoint that the trainer asked for could not be written; else ""."""
        if self._answer is None or not self._answer.done() or self._asked is None:
            return ""
        error = self._answer.exception()
        return "" if error is None or self._asked[0] != self._rank.learner.step else str(error)

    def _train(self, entry: LedgerEntry) -> None:
        self._tell(f"training on step {entry.step}")
        file = step_file_path(self._rank.steps_of, entry.step)
        await_file(file, CRITIC, self._still_waiting)
        self._checkpoints.wait_for_copies()
        began = time.monotonic()
        self._rank.run(TrainStep(entry.step, entry.plan))
        numbers = {name: float(f"{value:.4g}") for name, value in self._rank.learner.metrics.items()}
        seconds = time.monotonic() - began
        logger.info("step %d: %s, in %.1f s", entry.step, numbers, seconds)
        self._checkpoints.after_step(entry.step, seconds, file)

    def _still_waiting(self, path: Path) -> None:
        self._tell(f"waiting for {path}")
        self._rank.channel.tick()

    def _between_rounds(self) -> None:
        self._tell(self._detail)

    def _tell_of_disk(self, detail: str) -> None:
        self._stage.turns += 1
        self._report(detail)

    def _tell(self, detail: str) -> None:
        """Report that something goes on."""
        self._detail = detail
        self._stage.turns += 1
        self._report(detail)
