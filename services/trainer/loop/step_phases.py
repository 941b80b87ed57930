"""The open step, and the order of work on its groups: train while the step fills, or prepare, and train once it is
full.

Rank 0 drives all ranks through it. With one update per step, and no columns to compute beforehand, micro-batches are
trained as they come. Otherwise a step has two phases. While it fills, forward passes compute what all its updates need:
log-probs under the weights at its beginning and under frozen models, and the critic's values. Once it is full,
advantages that need these columns are computed, and measured if they are to be normalised over the step. Then its
groups are divided into mini-batches, and each mini-batch makes an update in each epoch. Advantages are normalised when
they are packed: a group's column stays unchanged, and the plan records the normalisation.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from opentelemetry.trace import Span

from relaxd import telemetry
from relaxd.algorithms import Algorithm
from relaxd.algorithms.advantage_terms import Whitening
from relaxd.board import ADVANTAGES, LOSS_MASK, TRAIN, Delivery, GroupTimes, StageTime, microseconds
from relaxd.config import RunConfig
from services.trainer.batch.groups import TrainGroup
from services.trainer.batch.micro_batch_division import (
    Packer,
    add_group,
    bundles,
    dp_ranks_of_groups,
    mini_batch,
    pack_rounds,
    split,
)
from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, StepPlan, schedule_length
from services.trainer.loop.round_runner import GroupFailed
from services.trainer.loop.training_commands import TrainingRank, assemble, prepare, train_round
from services.trainer.loop.training_queue import DeliveredGroup
from services.trainer.megatron.disk_work import Progress

logger = logging.getLogger(__name__)


class StepBuilder:
    """The open step: its groups, rounds, mini-batches and times."""

    def __init__(self, number: int, packer: Packer, carrier: dict[str, str]) -> None:
        """`carrier`: the step's trace context; each group's train span links to it."""
        self.number = number
        self.packer = packer
        self.members: dict[str, DeliveredGroup] = {}
        self.rounds: list[MicroBatchRound] = []
        """Rounds of micro-batches trained while the step filled."""
        self.sealed = False
        """True once the last round is trained: the step takes no more groups."""
        self.mini_batches: tuple[MiniBatch, ...] = ()
        """Mini-batches of the step; known when it closes."""
        self.whitening: Whitening | None = None
        """Normalisation of the advantages, if any; known when the step closes."""
        self.waited = 0.0
        """Seconds spent waiting for groups."""
        self.worked = 0.0
        """Seconds of computation: forward and backward passes, and the optimizer."""
        self.held_back = 0.0
        """Seconds that the optimizer waited for a weight broadcast."""
        self.wrote = 0.0
        """Seconds spent writing the step file."""
        self.started = time.monotonic()
        self.started_at: dict[str, int] = {}
        """Time at which each group joined the step, by group id, in microseconds of Unix time."""
        self.times: dict[str, GroupTimes] = {}
        """Times that each group spent in earlier stages, by group id; known when the step closes."""
        self._carrier = carrier
        self._spans: list[Span] = []

    @property
    def groups(self) -> dict[str, TrainGroup]:
        """The step's groups by id."""
        return {group_id: taken.group for group_id, taken in self.members.items()}

    def deliveries_of(self, entry: MicroBatchRound) -> tuple[Delivery, ...]:
        """Return the board's deliveries of the groups in a round, sorted by group id."""
        return tuple(self.members[group_id].delivery for group_id in sorted(entry.group_ids))

    def trace_ids(self) -> dict[str, dict[str, str]]:
        """Return each group's trace_id and step_trace_id, by group id; "" where nothing is traced."""
        step = telemetry.trace_id(self._carrier)
        return {
            group_id: {"trace_id": telemetry.trace_id(taken.delivery.trace), "step_trace_id": step}
            for group_id, taken in self.members.items()
        }

    def add(self, chosen: Sequence[DeliveredGroup]) -> None:
        """Add delivered groups to the step, pack their tokens, and open their train spans."""
        now = microseconds()
        for taken in chosen:
            self.members[taken.group.group_id] = taken
            self.started_at[taken.group.group_id] = now
            add_group(self.packer, taken.group)
            self._spans.append(
                telemetry.open_stage_span(
                    TRAIN,
                    taken.group.group_id,
                    taken.delivery.trace,
                    waited_seconds=StageTime(taken.delivery.enqueued_at, now, now).queue_seconds,
                    started_at=now,
                    attributes={"relaxd.step": self.number},
                    links=[self._carrier],
                )
            )

    def plan(self, config: RunConfig, term: int, reference: str = "") -> StepPlan:
        """Return the step's plan, for its record. The mini-batches must be set.

        Args:
            config: the run's configuration.
            term: term of the trainer.
            reference: `StepPlan.reference`.
        """
        return StepPlan(
            step=self.number,
            term=term,
            seed=config.run.seed,
            groups=tuple(self.members),
            mini_batches=self.mini_batches,
            epochs=config.trainer.epochs,
            whitening=self.whitening,
            refreshed=config.refreshed_after(self.number),
            reference=reference,
        )

    def end_spans(self, ended: int | None = None) -> None:
        """End the groups' train spans, at `ended` (microseconds of Unix time) or now."""
        for span in self._spans:
            span.end(None if ended is None else ended * 1000)
        self._spans.clear()


BUNDLE_BYTES = 64 * 2**20
"""Maximum bytes of groups in one `assemble` command, so that neither memory nor the ranks' waits for each other grow
with the step."""


class StepPhases(ABC):
    """Base class of the two orders in which a step's work is done."""

    def __init__(self, config: RunConfig, algorithm: Algorithm, rank: TrainingRank) -> None:
        self._config = config
        self._algorithm = algorithm
        self._rank = rank

    def packer(self) -> Packer:
        """Return an empty packer of micro-batches. Each round is one pipeline schedule, also in preparation."""
        trainer = self._config.trainer
        per_rank = schedule_length(trainer.pipeline_parallel, trainer.pipeline_chunks)
        return Packer(self._config.micro_batch_tokens, trainer.data_parallel, per_rank)

    @abstractmethod
    def take(self, open_step: StepBuilder, entry: MicroBatchRound, *, last: bool) -> None:
        """Work on the step's next round of micro-batches, while the step fills.

        Args:
            open_step: the step.
            entry: the round.
            last: whether the step closes after this round.
        """

    @abstractmethod
    def close(self, open_step: StepBuilder) -> bool:
        """Divide the full step into mini-batches. Return True if all ranks have their groups.

        False means that groups were closed: by others, or here because they can't be trained on. This method may be
        called again.
        """

    @abstractmethod
    def rounds(self, update: MiniBatch) -> Sequence[MicroBatchRound]:
        """Return the rounds of micro-batches that must still run before an optimizer update."""


def phases_for(config: RunConfig, algorithm: Algorithm, rank: TrainingRank) -> StepPhases:
    """Return a run's order of work: train while a step fills if it has one update and nothing to compute first."""
    needs = algorithm.needs
    waits = needs.whitened or needs.values or rank.runner.prepares or rank.runner.makes_advantages
    at_once = config.trainer.updates_per_step == 1 and not waits
    return (TrainedWhileFilling if at_once else PreparedThenTrained)(config, algorithm, rank)


class TrainedWhileFilling(StepPhases):
    """Order of work for steps of one update: accumulate gradients while the step fills."""

    def take(self, open_step: StepBuilder, entry: MicroBatchRound, *, last: bool) -> None:
        """Run a round's forward and backward passes. The last round starts the reduction: no round may follow."""
        self._rank.groups = open_step.groups
        self._rank.run(train_round, entry, open_step.deliveries_of(entry), last=last)
        open_step.rounds.append(entry)
        open_step.sealed = last

    def close(self, open_step: StepBuilder) -> bool:
        """Make one mini-batch of all rounds. Always return True."""
        self._rank.groups = open_step.groups
        open_step.mini_batches = (mini_batch(open_step.groups.values(), open_step.rounds, self._algorithm),)
        return True

    def rounds(self, update: MiniBatch) -> Sequence[MicroBatchRound]:
        """Return (): all rounds ran while the step filled."""
        return ()


class PreparedThenTrained(StepPhases):
    """Order of work for all other steps: compute columns while the step fills, then train epochs × mini-batches."""

    def take(self, open_step: StepBuilder, entry: MicroBatchRound, *, last: bool) -> None:
        """Compute the columns of a round with forward passes, if any are needed."""
        self._rank.groups = open_step.groups
        if self._rank.runner.prepares:
            self._rank.run(prepare, entry, open_step.deliveries_of(entry))

    def close(self, open_step: StepBuilder) -> bool:
        """Add computed columns to the groups, divide these into mini-batches, send each to the ranks that train it."""
        groups, count = list(open_step.groups.values()), self._config.trainer.mini_batches
        # The other ranks don't wait in a collective: with many tokens this may take longer than its deadline.
        with self._rank.rank0_only(f"dividing step {open_step.number} into mini-batches") as progress:
            prepared, failed = self._prepared(groups, progress)
            if not failed:
                groups = [group.with_columns(prepared[group.group_id]) for group in groups]
                if self._algorithm.needs.whitened:
                    open_step.whitening = Whitening.of(
                        [group.columns[ADVANTAGES] for group in groups], [group.columns[LOSS_MASK] for group in groups]
                    )
                parts = split(groups, count, seed=(self._config.run.seed, open_step.number))
                open_step.mini_batches = tuple(
                    mini_batch(part, pack_rounds(part, self.packer()), self._algorithm) for part in parts
                )
        self._rank.groups = open_step.groups
        for group_id, problem in failed.items():
            logger.error("group %s is dropped: %s", group_id, problem)
            self._rank.board.drop(open_step.members[group_id].delivery, reason=problem.reason, detail=str(problem))
        return not failed and self._assemble(open_step, groups, prepared)

    def rounds(self, update: MiniBatch) -> Sequence[MicroBatchRound]:
        """Return all rounds of the update's mini-batch."""
        return update.rounds

    def _prepared(
        self, groups: Sequence[TrainGroup], progress: Progress
    ) -> tuple[dict[str, dict[str, NDArray[Any]]], dict[str, GroupFailed]]:
        """Return prepared columns by group id, and the error of each group that can't be trained on."""
        prepared: dict[str, dict[str, NDArray[Any]]] = {}
        failed: dict[str, GroupFailed] = {}
        for group in groups:
            try:
                columns = self._rank.runner.prepared_columns(group, self._rank.prepared)
            except GroupFailed as error:
                failed[group.group_id] = error
            else:
                prepared[group.group_id] = columns
                progress(sum(column.nbytes for column in columns.values()))
        return prepared, failed

    def _assemble(
        self,
        open_step: StepBuilder,
        groups: Sequence[TrainGroup],
        columns: Mapping[str, Mapping[str, NDArray[Any]]],
    ) -> bool:
        """Send each group, with its prepared columns, to the ranks that train it. Return True if none is missing."""
        dp_ranks, done = dp_ranks_of_groups(open_step.mini_batches), 0
        for bundle in bundles(groups, BUNDLE_BYTES):
            ids = [group.group_id for group in bundle]
            everywhere = self._rank.run(
                assemble,
                tuple(open_step.members[group_id].delivery for group_id in ids),
                {group_id: columns[group_id] for group_id in ids},
                {group_id: dp_ranks[group_id] for group_id in ids},
            )
            if not everywhere:
                return False
            done += len(bundle)
            self._rank.channel.disk.report(f"step {open_step.number}: {done} of {len(groups)} groups are handed out")
        return True
