"""One rank of a critic's replica, a child process of the service. Rank 0 trains exactly once on each committed step, in
order, and computes values in between.

Training has priority, so values come from a critic trained on all steps committed so far. The ledger lists the
committed steps. A critic that dies loads its newest checkpoint and repeats the steps after it from their files, as
a trainer does.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.board import (
    CRITIC_STATE,
    Board,
    BoardUnavailable,
    Column,
    CriticOrders,
    DropReason,
    LedgerEntry,
    stages_for,
)
from relaxd.config import RunConfig
from relaxd.process.child_server import ChildServer
from relaxd.process.upkeep import freeze_objects
from relaxd.roles import CRITIC
from relaxd.run_folder import critic_folder
from relaxd.v1 import rank_pb2 as pb
from relaxd.v1 import rank_pb2_grpc
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.batch.step_plan import step_file_path
from services.trainer.critic.critic_learner import CriticLearner, CriticRank, compute_values, train_step
from services.trainer.loop.checkpoint_control import REMOVAL_SECONDS, Answer, Checkpoints, restore
from services.trainer.loop.commanded_rank import CheckpointPart
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.channels import RankChannel
from services.trainer.reference_models.followed_folder import await_file
from services.trainer.reference_models.model_rank import ModelRank, ModelStage, world_config

RETRY_SECONDS = 5.0
"""Seconds between two attempts to write a requested checkpoint."""

logger = logging.getLogger(__name__)


class CriticSuperseded(RuntimeError):
    """Another critic follows the run."""


class LedgerWentBack(RuntimeError):
    """The ledger lacks the step that the critic trained on last, or has another one in its place."""


class Follower:
    """Rank 0's loop: trains on each step in the ledger, computes values in between, and takes checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        rank: CriticRank,
        stage: ModelStage,
        report: Callable[[str], None],
    ) -> None:
        """Begin a critic term. `report` informs the service of progress. Raises RunMissing, BoardUnavailable."""
        self._rank = rank
        rank.channel.disk.report = self._tell_of_disk
        self._board = rank.board
        self._stage = stage
        self._report = report
        self._term = self._board.new_critic_term()
        self._own_config = config.model_copy(update={"trainer": world_config(config, CRITIC)})
        self.checkpoints = Checkpoints(self._own_config, run_id, self._term, rank)
        """The critic's checkpoints."""
        rank.progress = lambda: self._tell(self._detail)
        self._trained: LedgerEntry | None = None
        """The step that the critic trained on last; None before the first."""
        self._asked: tuple[int, bool] | None = None
        """Step of the last requested checkpoint, and whether it is kept; None before the first."""
        self._answer: Answer | None = None
        self._asked_at = 0.0
        self._detail = ""
        self._unavailable = False

    def restore(self) -> None:
        """Load the newest checkpoint. Raises CheckpointError if it doesn't fit this critic, BoardUnavailable."""
        self._tell("looking for a checkpoint")
        _, self._trained = restore(self._rank, self._own_config, self._term)
        self.checkpoints.prepare()

    def run(self) -> None:
        """Follow the run. Never returns.

        Raises:
            CriticSuperseded: another critic has begun to follow it.
            LedgerWentBack: the ledger has lost steps, which may have been committed again since.
            TooManySkippedUpdates: too many updates in a row weren't finite.
            StepFileError: a step's file is missing, or doesn't match the ledger.
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
        """Return the critic's state, for the column CRITIC_STATE."""
        learner = self._rank.learner
        return {"step": learner.step, "metrics": learner.metrics}

    def _train_next(self) -> bool:
        """Train on the next step if it is committed. Return False if the caller may compute values."""
        self.checkpoints.complete_if_written()
        try:
            problem = self._problem_of_ledger()
            following = self._rank.steps(self._rank.learner.step, 1)
            # Read after the ledger: the trainer asks for a checkpoint before it commits the next step.
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
            raise CriticSuperseded(
                f"this critic, of term {self._term}, ends: another one, of term {orders.term}, took over while this "
                "one was out of touch. A run has one critic"
            )
        if problem:
            raise LedgerWentBack(f"{problem}: the next critic starts from a checkpoint of a step in the ledger")
        self._take_orders(orders)
        # Also a checkpoint that was requested while the previous one was written.
        self.checkpoints.begin_if_wanted(self._rank.learner.step)
        if not following:
            return False
        (entry,) = following
        self._train(entry)
        return True

    def _problem_of_ledger(self) -> str:
        """Return "" if the ledger still has the step that the critic trained on last, else the difference.

        After losing touch, a critic may find the step committed again with other groups, even with steps after it.
        """
        if self._trained is None:
            return ""
        step = self._trained.step
        found = self._rank.steps(step - 1, 1)
        if not found:
            return f"the ledger ends at step {self._board.last_step()}, but this critic has trained on step {step}"
        if found[0].identity != self._trained.identity:
            return (
                f"step {step} was committed again, by the trainer of term {found[0].term}, since this critic trained "
                f"on that of term {self._trained.term}"
            )
        return ""

    def _take_orders(self, orders: CriticOrders) -> None:
        """Request the checkpoint that the trainer asked for, once the critic has trained on its step.

        A checkpoint that can't be written is tried again, also after later steps, because somebody waits for it.
        """
        step, now = self._rank.learner.step, time.monotonic()
        failed = bool(self._problem()) and now - self._asked_at > RETRY_SECONDS
        asked = (step, step == orders.kept) if step in (orders.checkpoint, orders.kept) else self._asked
        if asked is not None and (asked != self._asked or failed):
            self._asked, self._asked_at = asked, now
            self._answer = self.checkpoints.request(rotate=not asked[1])

    def _problem(self) -> str:
        """Return the reason why the requested checkpoint could not be written; else ""."""
        failed = self._answer is not None and self._answer.done() and self._answer.exception()
        return str(failed) if failed else ""

    def _train(self, entry: LedgerEntry) -> None:
        self._tell(f"training on step {entry.step}")
        file = step_file_path(self._rank.steps_of, entry.step)
        await_file(file, CRITIC, self._still_waiting)
        self.checkpoints.wait_for_copies()
        began = time.monotonic()
        self._rank.run(train_step, entry.step, entry.plan)
        self._trained = entry
        numbers = {name: float(f"{value:.4g}") for name, value in self._rank.learner.metrics.items()}
        seconds = time.monotonic() - began
        logger.info("step %d: %s, in %.1f s", entry.step, numbers, seconds)
        self.checkpoints.after_step(entry.step, seconds, file)

    def _still_waiting(self, path: Path) -> None:
        self._tell(f"waiting for {path}")
        self._rank.channel.tick()

    def _tell_of_disk(self, detail: str) -> None:
        self._stage.turns += 1
        self._report(detail)

    def _tell(self, detail: str) -> None:
        """Report progress."""
        self._detail = detail
        self._tell_of_disk(detail)


class CriticServiceRank(ModelRank):
    """A rank of the critic."""

    def __init__(self) -> None:
        super().__init__()
        self._follower: Follower | None = None

    def _clean_up(self) -> None:
        """Remove the replaced best checkpoint, because the last evaluation comes after the last checkpoint."""
        if self._follower is not None:
            wait([self._follower.checkpoints.remove_replaced()], REMOVAL_SECONDS)

    def _compute(self, request: pb.WorkRequest, config: RunConfig) -> None:
        create_tried(config.algorithm, with_loss=False)
        trainer, run_folder = world_config(config, request.role), Path(request.folder)
        learner = CriticLearner(config, self._report_loading if self._thread.number == 0 else None)
        freeze_objects()
        rank = CriticRank(
            channel=RankChannel(trainer.collective_timeout_seconds, learner.world.disk),
            learner=learner,
            checkpoint=CheckpointPart(learner),
            board=Board(request.redis, request.run_id, stages_for(config), config.board),
            run_folder=critic_folder(run_folder),
            steps_of=run_folder,
        )
        if self._thread.number != 0:
            rank.follow()

        def compute(name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
            self._report_progress()
            return rank.run(compute_values, micro_batches)

        self._stage = ModelStage(
            rank.board,
            request.role,
            request.replica_id,
            compute,
            vocab_sizes={"": learner.forward.architecture.vocab_size},
            temperature=config.rollout.temperature,
            micro_batch_tokens=trainer.micro_batch_tokens,
            pipeline_stages=trainer.pipeline_parallel,
            of_each=lambda: {CRITIC_STATE: follower.state()},
            what="value",
            reason=DropReason.NO_VALUES,
            on_failure=self._thread.fail,
        )
        follower = Follower(config, request.run_id, rank, self._stage, self._report_progress)
        follower.restore()
        self._follower = follower
        self._thread.events.put(pb.WorkResponse(loaded=pb.RankLoaded()))
        follower.run()


if __name__ == "__main__":
    ChildServer((rank_pb2_grpc.add_RankServicer_to_server, CriticServiceRank())).serve()
