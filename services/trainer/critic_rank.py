"""One rank of a critic's replica, a child process of the service. Rank 0 trains exactly once on each committed step, in
order, and computes values in between.

Training has priority, so values come from a critic trained on all steps committed so far. The ledger lists the
committed steps. A critic that dies loads its newest checkpoint and repeats the steps after it from their files, as
a trainer does.

`CriticLearner` is the critic of one rank: values, training on a step's file, snapshots. Commands are what ranks call
together. `Follower` works on rank 0.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray
from torch import Tensor

from relaxd.algorithms import create
from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.algorithms.base import WithCritic
from relaxd.board import (
    CRITIC_STATE,
    RETURNS,
    VALUES,
    Board,
    BoardUnavailable,
    Column,
    CriticOrders,
    DropReason,
    LedgerEntry,
    stages_for,
)
from relaxd.board.committed_steps import CommittedSteps
from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model
from relaxd.process.child_server import ChildServer
from relaxd.process.upkeep import freeze_objects
from relaxd.roles import CRITIC
from relaxd.run_folder import critic_folder
from relaxd.v1 import rank_pb2 as pb
from relaxd.v1 import rank_pb2_grpc
from services.trainer.batch.groups import TrainGroup, check_group
from services.trainer.batch.micro_batch import PackedMicroBatch, pack
from services.trainer.batch.micro_batch_division import Packer, pack_rounds
from services.trainer.batch.step_plan import (
    MicroBatchRound,
    MiniBatch,
    StepFile,
    StepFileError,
    read_committed,
    step_file_path,
)
from services.trainer.learner.critic import VALUE_LOSS, Critic
from services.trainer.learner.forward import Forward
from services.trainer.learner.offload import TRIM_EVERY_STEPS, trim_heap
from services.trainer.learner.policy_loss import add_reported, bit_sum, reduce_over_ranks
from services.trainer.learner.snapshot import Checkpointed, Stateful, load_snapshot
from services.trainer.learner.update import (
    TooManySkippedUpdates,
    UpdateStats,
    reduce_gradients,
    step_metrics,
    update_weights,
)
from services.trainer.loop.checkpoint_control import REMOVAL_SECONDS, Answer, Checkpoints, restore
from services.trainer.loop.commanded_rank import CheckpointPart, CommandedRank
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.channels import RankChannel
from services.trainer.megatron.rank_messages import command
from services.trainer.reference_models.followed_folder import await_file
from services.trainer.reference_models.model_rank import ModelRank, ModelStage, world_config

COLUMNS = ("prompt_tokens", "tokens", "lengths", "sample_of_sequence", "shares_prompt", "loss_mask", "reward", VALUES)
"""Columns of a step file that the critic reads. It also reads RETURNS, which needn't be finite."""

logger = logging.getLogger(__name__)


class CriticLearner(Checkpointed):
    """One rank's critic with gradients and optimizer. All ranks make the same calls in the same order.

    The critic trains a step with the policy's mini-batches and normalisers, but in other micro-batches.
    """

    def __init__(self, config: RunConfig, report: Callable[[str], None] | None = None) -> None:
        """Join the Megatron world and load the critic.

        Args:
            config: the run's configuration.
            report: called about every second with the progress of disk work (`DiskWork.report`).

        Raises:
            ModelError: the model isn't supported, can't be divided among the ranks, or isn't of the policy's
                architecture.
            ValueError: the number of processes or the optimizer's settings are wrong.
        """
        self._trainer = trainer = world_config(config, CRITIC)
        self._algorithm = cast(WithCritic, create(config.algorithm))
        self._temperature = config.rollout.temperature
        folder, own = resolve_model(config.model.path), config.roles.critic
        self.forward = Forward(folder, trainer, seed=config.run.seed, report=report)
        super().__init__(self.forward.world, trainer.collective_timeout_seconds)
        start = resolve_model(own.model, setting="roles.critic.model") if own.model else folder
        self._critic = Critic(self.forward, self._algorithm, trainer, own, start, steps=config.run.steps)
        self.step = 0
        """The last step that the critic trained on; 0 before the first."""
        self.metrics: dict[str, float] = {}
        """Critic's metrics of the last step that it trained on."""
        self._optimizer_steps = self._skipped_in_a_row = 0
        self._sums: dict[str, Tensor] = {}

    def values(self, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
        """Return the column VALUES of each micro-batch, [tokens], on all ranks; 0 for tokens with loss_mask 0."""
        return [{VALUES: row} for row in self._critic.values(micro_batches)]

    def train(self, file: StepFile, progress: Callable[[], None] = lambda: None) -> None:
        """Train on the next committed step, from its file, and call `progress` after each round of micro-batches.

        An update whose loss or gradient isn't finite is skipped, whether or not the policy's was.

        Raises:
            StepFileError: the file has no values or returns, or its groups are malformed.
            TooManySkippedUpdates: too many updates in a row weren't finite.
        """
        groups = {group_id: self._group(group_id, file) for group_id in file.plan.groups}
        updates: list[UpdateStats] = []
        for mini_batch in file.plan.updates:
            members = [groups[group_id] for group_id in file.plan.groups_of(mini_batch)]
            packer = Packer(self._trainer.micro_batch_tokens, 1, self._trainer.pipeline_parallel)
            rounds = pack_rounds(members, packer)
            for number, entry in enumerate(rounds, 1):
                self._accumulate(entry, groups, last=number == len(rounds))
                progress()
            updates.append(self._update(mini_batch, first=all(update.skipped for update in updates)))
            self._check_skipped(updates[-1])
        self.step += 1
        found = step_metrics(updates, 1)
        # JSON has no NaN, but the numbers of a skipped update may be NaN.
        of_critic = {name: value for name, value in found.items() if name.startswith("value_")}
        self.metrics = {name: value for name, value in of_critic.items() if math.isfinite(value)}
        self.metrics["value_skipped_updates"] = found["skipped_updates"]
        if self.step % TRIM_EVERY_STEPS == 0:
            trim_heap()

    def checksum(self) -> int:
        """Return a checksum of this rank's weights, by `bit_sum`."""
        return bit_sum(self._critic.module.parameters(), self.world.device)

    def restore(self, folder: Path, step: int, *, same_layout: bool) -> None:
        self._wait_for_copies()
        loaded = load_snapshot(self._stateful(step), folder, same_layout=same_layout)
        self._optimizer_steps, self.metrics, self.step = loaded.optimizer_steps, loaded.metrics, step
        # So that a restarted critic, which repeats the steps since the checkpoint, fails at the same update.
        self._skipped_in_a_row = loaded.skipped_in_a_row
        self._discard()

    def _group(self, group_id: str, file: StepFile) -> TrainGroup:
        columns = file.groups[group_id]
        try:
            return check_group(group_id, columns, COLUMNS).with_columns({RETURNS: columns[RETURNS]})
        except (KeyError, ValueError) as error:
            raise StepFileError(
                f"the file of step {file.plan.step} can't train a critic: group {group_id}: {error}"
            ) from error

    def _accumulate(self, entry: MicroBatchRound, groups: dict[str, TrainGroup], *, last: bool) -> None:
        (micro_batches,) = entry.micro_batches
        rows = [
            [
                sequence
                for piece in micro_batch
                for sequence in groups[piece.group_id].sequences(
                    piece.sequences, (VALUES, RETURNS), self._algorithm, self._temperature, None
                )
            ]
            for micro_batch in micro_batches
        ]
        for sums in self._critic.accumulate([pack(row) for row in rows], last=last):
            add_reported(self._sums, sums)

    def _update(self, mini_batch: MiniBatch, *, first: bool) -> UpdateStats:
        """Update the weights with the accumulated gradients; skip the update if loss or gradient isn't finite."""
        sums, self._sums = reduce_over_ranks(self._sums, self.world), {}
        values = {name: float(value) for name, value in sums.items()}
        loss = values.pop(VALUE_LOSS, 0.0) / mini_batch.normalizer
        try:
            reduce_gradients(self._critic.model, mini_batch.normalizer)
            self._wait_for_copies()
            pending = self._critic.pending(loss)
            (norm,), skipped = update_weights([pending], step=self.step + 1, first=first, skip=None)
        finally:
            self._discard()
        self._optimizer_steps += not skipped
        tokens, lr = mini_batch.trained_tokens, self._critic.lr
        metrics = {name: value / max(tokens, 1) for name, value in values.items()}
        metrics |= {VALUE_LOSS: loss, "value_grad_norm": norm, "value_lr": lr}
        return UpdateStats(
            step=self.step + 1, loss=loss, grad_norm=norm, skipped=skipped, lr=lr, tokens=tokens, metrics=metrics
        )

    def _check_skipped(self, update: UpdateStats) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if update.skipped else 0
        if not update.skipped:
            return
        logger.warning("an update of step %d is skipped: critic: %s", update.step, update.shown)
        if self._skipped_in_a_row > (most := self._trainer.max_skipped_updates):
            raise TooManySkippedUpdates(
                f"{self._skipped_in_a_row} updates of the critic in a row had a loss or a gradient that isn't finite, "
                f"more than trainer.max_skipped_updates = {most}; the last one is of step {update.step}: {update.shown}"
                ". Check the rewards; if they are right, start a run with a lower roles.critic.optimizer.lr"
            )

    def _discard(self) -> None:
        self._sums = {}
        self._critic.discard()

    def _stateful(self, step: int) -> Stateful:
        return Stateful(
            policy=self._critic.state,
            critic=None,
            frozen={},
            step=step,
            world=self.world,
            optimizer_steps=self._optimizer_steps,
            moments=self._trainer.checkpoint.moments,
            metrics=self.metrics,
            skipped_in_a_row=self._skipped_in_a_row,
        )


@dataclass
class CriticRank(CommandedRank):
    """State of one critic rank. Its `run_folder` is the critic's folder inside the run's folder."""

    learner: CriticLearner
    """This rank's critic."""
    steps_of: Path
    """The run's folder, with the step files."""
    progress: Callable[[], None] = lambda: None
    """Function called after each round of micro-batches, with which rank 0 reports progress."""

    @property
    def record_folder(self) -> Path:
        return self.steps_of

    @cached_property
    def steps(self) -> CommittedSteps:
        """Committed steps of the run, from the ledger and the step files."""
        return CommittedSteps(self.board.ledger, self.steps_of)


@command
def compute_values(rank: CriticRank, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
    """Compute the critic's values of the tokens in each micro-batch, and return them as column VALUES."""
    return rank.learner.values(micro_batches)


@command
def train_step(rank: CriticRank, step: int, plan: Mapping[str, Any]) -> None:
    """Read a committed step's file, and train on it; `plan`: the step's plan in the ledger. Raises StepFileError."""
    with rank.channel.disk.all_ranks(f"reading the file of step {step}") as progress:
        file = read_committed(rank.steps_of, step, plan, progress, (*COLUMNS, RETURNS))
    rank.learner.train(file, rank.progress)


RETRY_SECONDS = 5.0
"""Interval between attempts to write a requested checkpoint, in seconds."""


class CriticSuperseded(RuntimeError):
    """Raised if another critic has begun to train on this run's steps."""


class LedgerWentBack(RuntimeError):
    """Raised if the ledger lacks the last step that the critic trained on, or has a different step in its place."""


class Follower:
    """Loop of rank 0: trains on each step in the ledger, computes values between steps, and writes checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        rank: CriticRank,
        stage: ModelStage,
        report: Callable[[str], None],
    ) -> None:
        """Begin a new critic term. `report` sends progress to the service. Raises RunMissing, BoardUnavailable."""
        self._rank = rank
        rank.channel.disk.report = self._tell_of_disk
        self._board = rank.board
        self._stage = stage
        self._report = report
        self._term = self._board.new_critic_term()
        self._own_config = config.model_copy(update={"trainer": world_config(config, CRITIC)})
        self.checkpoints = Checkpoints(self._own_config, run_id, self._term, rank)
        """Controller of the critic's checkpoints."""
        rank.progress = lambda: self._tell(self._detail)
        self._trained: LedgerEntry | None = None
        """Ledger entry of the last step that the critic trained on; None before the first."""
        self._asked: tuple[int, bool] | None = None
        """Step of the last requested checkpoint, and whether to keep the checkpoint; None before the first request."""
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
        """Train on each step that the run commits, and compute values between steps. Never returns.

        Raises:
            CriticSuperseded: another critic has begun to train on the run's steps.
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
        """Train on the next step if it is committed.

        Returns False if it isn't committed, and True if the step was trained or the board is unavailable.
        """
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
        """Return "" if the ledger still has the last step that the critic trained on, else an error message.

        After losing the board, a critic may find that the step was committed again with other groups.
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
        """Request the checkpoint for which the trainer asks, once the critic has trained on its step.

        A checkpoint that can't be written is requested again, also after later steps, because somebody waits for it.
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
        """Report to the service what this rank does."""
        self._detail = detail
        self._tell_of_disk(detail)


class CriticServiceRank(ModelRank):
    """Process of one critic rank, which serves the critic service."""

    def __init__(self) -> None:
        super().__init__()
        self._follower: Follower | None = None

    def _clean_up(self) -> None:
        """Remove the best checkpoint that the last evaluation replaced, because no later checkpoint removes it."""
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
