"""The critic of one rank of its service: values, training on a step's file, snapshots, and the commands that ranks
call together.
"""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from numpy.typing import NDArray
from torch import Tensor

from relaxd.algorithms import create
from relaxd.algorithms.base import WithCritic
from relaxd.board import RETURNS, VALUES
from relaxd.board.committed_steps import CommittedSteps
from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model
from relaxd.roles import CRITIC
from services.trainer.batch.groups import TrainGroup, check_group
from services.trainer.batch.micro_batch import PackedMicroBatch, pack
from services.trainer.batch.micro_batch_division import Packer, pack_rounds
from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, StepFile, StepFileError, read_committed
from services.trainer.learner.critic import VALUE_LOSS, Critic
from services.trainer.learner.forward import Forward
from services.trainer.learner.offload import TRIM_EVERY_STEPS, trim_heap
from services.trainer.learner.policy_loss import add_reported, bit_sum, reduce_over_ranks
from services.trainer.learner.snapshots.snapshot import Checkpointed, Stateful, load_snapshot
from services.trainer.learner.update import (
    TooManySkippedUpdates,
    UpdateStats,
    reduce_gradients,
    step_metrics,
    update_weights,
)
from services.trainer.loop.commanded_rank import CommandedRank
from services.trainer.megatron.rank_messages import command
from services.trainer.reference_models.model_rank import world_config

COLUMNS = ("prompt_tokens", "tokens", "lengths", "sample_of_sequence", "shares_prompt", "loss_mask", "reward", VALUES)
"""Columns of a step file that the critic reads. It also reads RETURNS, which needn't be finite."""

logger = logging.getLogger(__name__)


class CriticLearner(Checkpointed):
    """The critic, its gradients and its optimizer. All ranks make the same calls in the same order.

    A step has the policy's updates, with the same groups and normalisers, but is divided into other micro-batches.
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
        """Metrics of the critic in that step."""
        self._optimizer_steps = self._skipped_in_a_row = 0
        self._sums: dict[str, Tensor] = {}

    def values(self, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
        """Return the column VALUES of each micro-batch, [T], on all ranks, computed for tokens with loss_mask 1."""
        return [{VALUES: row} for row in self._critic.values(micro_batches)]

    def train(self, file: StepFile, progress: Callable[[], None] = lambda: None) -> None:
        """Train on the next step, and call `progress` after each round of micro-batches.

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
        """Return the `bit_sum` of this rank's weights."""
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
        """Update the weights with the accumulated gradients, unless loss or gradient isn't finite."""
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
    """The state of a rank that trains the critic. Its `run_folder` is the critic's folder, inside the run's."""

    learner: CriticLearner
    """The critic."""
    steps_of: Path
    """The run's folder, with the step files."""
    progress: Callable[[], None] = lambda: None
    """Called after each round of a step; rank 0 reports progress with it."""

    @property
    def record_folder(self) -> Path:
        return self.steps_of

    @cached_property
    def steps(self) -> CommittedSteps:
        """The committed steps of the run."""
        return CommittedSteps(self.board.ledger, self.steps_of)


@command
def compute_values(rank: CriticRank, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
    """Return the column VALUES of each micro-batch."""
    return rank.learner.values(micro_batches)


@command
def train_step(rank: CriticRank, step: int, plan: Mapping[str, Any]) -> None:
    """Read a committed step's file, and train on it; `plan`: the step's plan in the ledger. Raises StepFileError."""
    with rank.channel.disk.all_ranks(f"reading the file of step {step}") as progress:
        file = read_committed(rank.steps_of, step, plan, progress, (*COLUMNS, RETURNS))
    rank.learner.train(file, rank.progress)
