"""Which groups a step gets, which are too old for it, and when it may close.

The staleness of a token in step s is (s - 1) - version and must not exceed max_staleness. At step s a group is

- too old if its oldest trained token has a version below (s - 1) - max_staleness: it is dropped, its prompt retried;
- due if it would be too old at step s + 1: the step must take it, and waits for it if it is still being generated or
  scored. Slow groups have long answers; dropping them would train the model towards short ones.

A step takes groups until it has groups_per_step of them and no open group is due. Places are reserved for due groups,
so a step exceeds groups_per_step only if more groups than that are due.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from relaxd.algorithms import Algorithm, AlgorithmError
from relaxd.algorithms.results import filtered_by, token_weights_of
from relaxd.board import ADVANTAGES, CRITIC_STATE, LOSS_MASK, Delivery, DropReason, stages_for
from relaxd.board.worker import Drop
from relaxd.config import RunConfig
from relaxd.config.algorithm import OwnConfig
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from services.trainer.batch.groups import TrainGroup


@dataclass(frozen=True)
class DeliveredGroup:
    """A group that the trainer holds."""

    delivery: Delivery
    """Delivery of the group."""
    group: TrainGroup
    """Columns of the group."""
    arrival: int
    """Number of the group in the order of arrival."""
    oldest_version: int | None = None
    """`TrainGroup.oldest_version`, computed once because it reads all tokens."""

    @property
    def critic_step(self) -> int:
        """The last step on which the critic was trained that gave the values, in a run with a critic service."""
        return int(self.group.columns[CRITIC_STATE]["step"])


@dataclass(frozen=True)
class Selection:
    """Groups chosen for a step."""

    chosen: list[DeliveredGroup]
    """Groups for the step now."""
    may_close: bool
    """True if the step is then complete and need not wait for more."""


def oldest_allowed(step: int, max_staleness: int) -> int:
    """Return the oldest version whose tokens a step may train on."""
    return step - 1 - max_staleness


def due_groups(step: int, max_staleness: int, open_versions: Mapping[str, int]) -> set[str]:
    """Return the ids of open groups that would be too old at the next step.

    Args:
        step: the step that is being filled.
        max_staleness: board.max_staleness.
        open_versions: oldest version of each open group whose generation has begun, by group id.
    """
    return {group for group, version in open_versions.items() if version < oldest_allowed(step + 1, max_staleness)}


def choose(
    ready: Collection[DeliveredGroup], members: Collection[str], due: Collection[str], groups_per_step: int
) -> list[DeliveredGroup]:
    """Choose the groups that the step takes now: due groups first, then by arrival.

    Args:
        ready: held groups, none of them too old.
        members: ids of the groups that the step already has.
        due: ids of open groups that would be too old at the next step, members included.
        groups_per_step: trainer.groups_per_step.
    """
    outstanding = set(due) - set(members)
    chosen = [taken for taken in ready if taken.group.group_id in outstanding]
    free = groups_per_step - len(members) - len(outstanding)
    others = sorted(
        (taken for taken in ready if taken.group.group_id not in outstanding), key=lambda taken: taken.arrival
    )
    return sorted(chosen, key=lambda taken: taken.arrival) + others[: max(free, 0)]


def may_close(members: Collection[str], due: Collection[str], groups_per_step: int) -> bool:
    """Return whether the step has enough groups and no other open group must join it."""
    return len(members) >= groups_per_step and not set(due) - set(members)


class GroupRefusals:
    """Looks at each group once, before it has a place in a step: a step that has it can only be discarded as a whole.

    Where the trainer computes the advantages, there is no advantage stage that could have filtered it.
    """

    def __init__(
        self, config: RunConfig, algorithm: Algorithm, vocab_sizes: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Prepare for a run.

        Args:
            config: the run's configuration.
            algorithm: its algorithm.
            vocab_sizes: `Learner.vocab_sizes`.

        Raises:
            FilterError: data.curriculum.filter can't be imported, or isn't a function.
        """
        self._algorithm = algorithm
        self._vocab_sizes = vocab_sizes
        self._own = isinstance(config.algorithm, OwnConfig)
        self._filters = ADVANTAGES not in stages_for(config)[-1].needs
        own = config.data.curriculum.filter
        self._filter = GroupFilter(own) if own and self._filters else None

    def refusal(self, group: TrainGroup) -> Drop | None:
        """Return the reason why a group is dropped; None if it may be trained on."""
        columns, lengths = group.columns, group.sample_lengths
        largest = int(columns["tokens"].max(initial=0))
        for role, size in self._vocab_sizes.items():
            if largest >= size:
                detail = f"it has token {largest}, but the {role} has only {size} tokens"
                return Drop(DropReason.NO_LOGPROBS, detail=detail)
        try:
            if self._own:
                token_weights_of(self._algorithm, columns[LOSS_MASK], lengths)
            if not self._filters:
                return None
            if self._filter is not None and not self._filter.keeps(columns):
                return Drop(DropReason.FILTERED, filtered=True)
            found = filtered_by(self._algorithm, np.asarray(columns["reward"], np.float64), lengths, columns)
        except FilterError as error:
            return Drop(DropReason.FILTER_FAILED, detail=str(error))
        except AlgorithmError as error:
            return Drop(DropReason.ALGORITHM_FAILED, detail=str(error))
        return None if found is None else Drop(found.reason, filtered=True)
