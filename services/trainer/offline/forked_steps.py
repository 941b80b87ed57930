"""Recorded steps under a fork's settings, with recomputed values of everything that rewards and weights determine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relaxd.algorithms import AlgorithmError, create
from relaxd.algorithms.advantage_terms import Whitening
from relaxd.board import ADVANTAGES, LOSS_MASK
from relaxd.config import RunConfig
from services.trainer.batch.groups import MalformedGroup, TrainGroup, check_group
from services.trainer.batch.micro_batch_division import mini_batch
from services.trainer.batch.step_plan import StepFile, StepPlan
from services.trainer.learner.learner import Learner
from services.trainer.loop.round_runner import GroupFailed, PreparedColumns, RoundRunner
from services.trainer.megatron.channels import all_gather
from services.trainer.offline.program_parts import OfflineError


class ForkedSteps:
    """A run's recorded steps, with columns recomputed under the fork's settings."""

    def __init__(self, learner: Learner, config: RunConfig, rewards: Mapping[str, Mapping[str, Any]]) -> None:
        """`rewards` has the columns of new rewards, by group."""
        self.runner = RoundRunner(learner, config)
        self._world = learner.world
        self._config = config
        self._algorithm = create(config.algorithm)
        self._rewards = rewards
        # Advantages of turns or players depend on columns that aren't recorded, so they stay unchanged.
        self._makes_advantages = ADVANTAGES in self.runner.columns and config.agent.credit == "sample"

    def prepare(self, file: StepFile) -> tuple[StepPlan, dict[str, TrainGroup]]:
        """Return the plan and groups of a step under the fork's settings. All ranks call it together.

        The division into micro-batches stays. Values that depend on rewards and weights are computed again: advantages,
        prepared columns and the loss's divisors. A group that the algorithm filters has advantages of 0.

        Raises OfflineError: the fork needs a column that wasn't recorded, or an algorithm fails on a group.
        """
        plan = file.plan
        try:
            groups = {group_id: self._group(group_id, file) for group_id in plan.groups}
            prepared = self._prepared(plan, groups)
            groups = {
                group_id: group.with_columns(self.runner.prepared_columns(group, prepared))
                for group_id, group in groups.items()
            }
        except (AlgorithmError, GroupFailed, MalformedGroup) as error:
            raise OfflineError(f"step {plan.step} can't be trained under these settings: {error}") from error
        every = groups.values()
        whitening = None
        if self._algorithm.needs.whitened:
            whitening = Whitening.of(
                [one.columns[ADVANTAGES] for one in every], [one.columns[LOSS_MASK] for one in every]
            )
        mini_batches = tuple(
            mini_batch([groups[group_id] for group_id in plan.groups_of(one)], one.rounds, self._algorithm)
            for one in plan.mini_batches
        )
        epochs = self._config.trainer.epochs
        return replace(plan, mini_batches=mini_batches, epochs=epochs, whitening=whitening), groups

    def _group(self, group_id: str, file: StepFile) -> TrainGroup:
        """Return a group with the fork's rewards, and with new advantages unless they need the trainer's columns."""
        columns = {**file.groups[group_id], **self._rewards.get(group_id, {})}
        names = [name for name in self.runner.columns if name != ADVANTAGES or not self._makes_advantages]
        if missing := [name for name in names if name not in columns]:
            raise OfflineError(
                f"the file of step {file.plan.step} has no column {missing[0]}, which these settings need "
                f"(algorithm.name = {self._config.algorithm.name!r}): it was not recorded"
            )
        group = check_group(group_id, columns, names)
        return group.with_columns({ADVANTAGES: self.runner.advantages(group)[0]}) if self._makes_advantages else group

    def _prepared(self, plan: StepPlan, groups: Mapping[str, TrainGroup]) -> PreparedColumns:
        """Return the columns that forward passes compute, gathered from all ranks."""
        prepared: PreparedColumns = {}
        if not self.runner.prepares:
            return prepared
        for entry in (entry for one in plan.mini_batches for entry in one.rounds):
            for found in self.runner.prepare(entry, groups):
                for columns in all_gather(found if self._world.first_of_replica else {}):
                    prepared |= columns
        return prepared
