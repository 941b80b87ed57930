"""Execution of a step's rounds on one rank, the same for live and replayed steps."""

from collections.abc import Collection, Mapping

from relaxd.algorithms import create
from relaxd.board import stages_for
from relaxd.config import RunConfig
from services.trainer.batch.groups import TrainGroup, check_group
from services.trainer.batch.row_packing import PackedMicroBatch, empty_micro_batch, pack
from services.trainer.batch.step_file import StepFile
from services.trainer.batch.step_plan import MicroBatchRound, MicroBatchSlices
from services.trainer.learner.learner import Learner, StepStats

ROLLOUT_LOGPROBS = "rollout_logprobs"
"""The column that the learner compares with its own log-probs, whatever the algorithm needs."""


class RoundRunner:
    """Accumulates gradients from plans and columns."""

    def __init__(self, learner: Learner, config: RunConfig) -> None:
        self._learner = learner
        self._algorithm = create(config.algorithm)
        self._temperature = config.rollout.temperature
        self._columns = stages_for(config)[-1].needs
        needed = dict.fromkeys((ROLLOUT_LOGPROBS, *self._algorithm.needs.loss))
        self._packed_columns = [name for name in needed if name in self._columns]

    def own_groups(self, entry: MicroBatchRound) -> set[str]:
        """Return the ids of the groups whose columns this rank needs in a round."""
        own = entry.micro_batches[self._learner.world.dp_rank]
        return {piece.group_id for micro_batch in own for piece in micro_batch}

    def run(self, entry: MicroBatchRound, groups: Mapping[str, TrainGroup]) -> None:
        """Run forward and backward on this rank's micro-batches of a round. Skip groups that aren't in `groups`."""
        own = entry.micro_batches[self._learner.world.dp_rank]
        self._learner.accumulate([self._packed(micro_batch, groups) for micro_batch in own])

    def replay(self, file: StepFile, skipped_updates: Collection[int] | None) -> StepStats:
        """Replay a whole step.

        Args:
            file: the step's plan and columns.
            skipped_updates: `StepPlan.skipped_updates` of the ledger: these updates are skipped again, all others are
                repeated. None: unknown; an update is skipped if its loss or gradient isn't finite.

        Raises:
            NonFiniteGradients: an update that was applied before isn't finite now.
        """
        groups = {
            group_id: check_group(group_id, file.groups[group_id], self._columns) for group_id in file.plan.groups
        }
        for entry in file.plan.rounds:
            self.run(entry, groups)
        return self._learner.finish(
            file.plan.normalizer, skip=None if skipped_updates is None else 0 in skipped_updates
        )

    def _packed(self, micro_batch: MicroBatchSlices, groups: Mapping[str, TrainGroup]) -> PackedMicroBatch:
        sequences = [
            sequence
            for piece in micro_batch
            if piece.group_id in groups
            for sequence in groups[piece.group_id].sequences(
                piece.sequences, self._packed_columns, self._algorithm, self._temperature, self._learner.step
            )
        ]
        return pack(sequences) if sequences else empty_micro_batch(self._packed_columns)
