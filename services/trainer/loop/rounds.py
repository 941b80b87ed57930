"""Running a step's rounds on this rank: the same for a step that is being taken, one that is replayed, and any rank."""

from collections.abc import Collection, Mapping

from relaxd.algorithms import Algorithm
from services.trainer.batch.groups import Group, check_group
from services.trainer.batch.packing import PackedMicroBatch, empty_micro_batch, pack
from services.trainer.batch.plan import MicroBatchRound, MicroBatchSlices
from services.trainer.batch.step_file import StepFile
from services.trainer.learner.learner import Learner, StepStats


class RoundRunner:
    """Turns plans and columns into gradients."""

    def __init__(self, learner: Learner, algorithm: Algorithm, temperature: float) -> None:
        """Samples were drawn at `temperature`."""
        self._learner = learner
        self._algorithm = algorithm
        self._temperature = temperature

    def own_groups(self, entry: MicroBatchRound) -> list[str]:
        """Ids of the groups whose columns this rank needs in a round, in order."""
        own = entry.micro_batches[self._learner.world.data_rank]
        return list(dict.fromkeys(piece.group_id for micro_batch in own for piece in micro_batch))

    def run(self, entry: MicroBatchRound, groups: Mapping[str, Group]) -> None:
        """Forward and backward of this rank's micro-batches of a round, without the groups that aren't in `groups`."""
        own = entry.micro_batches[self._learner.world.data_rank]
        self._learner.accumulate([self._packed(micro_batch, groups) for micro_batch in own])

    def replay(self, file: StepFile, skipped_updates: Collection[int] | None) -> StepStats:
        """Repeat a whole step.

        Args:
            file: the step's plan and columns.
            skipped_updates: which updates the ledger says were skipped (`StepPlan.skipped_updates`): they are
                skipped again, and the others done again. None, where no ledger says so: the numbers decide.

        Raises:
            NonFiniteGradients: an update that was done can't be repeated.
        """
        groups = {group_id: check_group(group_id, file.groups[group_id]) for group_id in file.plan.groups}
        for entry in file.plan.rounds:
            self.run(entry, groups)
        return self._learner.finish(
            file.plan.normalizer, skip=None if skipped_updates is None else 0 in skipped_updates
        )

    def _packed(self, micro_batch: MicroBatchSlices, groups: Mapping[str, Group]) -> PackedMicroBatch:
        samples = [
            sample
            for piece in micro_batch
            if piece.group_id in groups
            for sample in groups[piece.group_id].samples(
                piece.samples, self._algorithm, self._temperature, self._learner.step
            )
        ]
        return pack(samples) if samples else empty_micro_batch()
