"""Which groups a step gets, which are too old for it, and when it may close.

The staleness of a token in step s is (s - 1) - version and must not exceed max_staleness. At step s a group is

- too old if its oldest trained token has a version below (s - 1) - max_staleness: it is dropped, its prompt retried;
- due if it would be too old at step s + 1: the step must take it, and waits for it if it is still being generated or
  scored. Slow groups have long answers; dropping them would train the model towards short ones.

A step takes groups until it has groups_per_step of them and no open group is due. Places are reserved for due groups,
so a step exceeds groups_per_step only if more groups than that are due.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from relaxd.algorithms import Algorithm, AlgorithmError
from relaxd.algorithms.results import filtered_by, token_weights_of
from relaxd.board import ADVANTAGES, CRITIC_STATE, LOSS_MASK, WEIGHT_RECEIPTS, Delivery, DropReason, stages_for
from relaxd.board.worker import Drop
from relaxd.config import RunConfig
from relaxd.config.algorithm import OwnConfig
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from relaxd.weights.receipts import Receipt
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
        """Last training step of the critic that computed the values, in a run with a critic service."""
        return int(self.group.columns[CRITIC_STATE]["step"])


@dataclass(frozen=True)
class Selection:
    """Groups chosen for a step."""

    chosen: list[DeliveredGroup]
    """Groups that the step takes now."""
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
    """Return True if the step has enough groups and no other open group must join it."""
    return len(members) >= groups_per_step and not set(due) - set(members)


class GroupRefusals:
    """Checks each group once, before a step takes it: a step with a bad group can only be discarded as a whole.

    If the trainer computes the advantages, no advantage stage has filtered the groups, so this class does.
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


class ReceiptCheck:
    """Compares the receipts of groups with the digests of sent weights.

    The board keeps the digests of versions that a step may still train on.
    """

    def __init__(self, sent_weights: Callable[[], Mapping[int, Sequence[str]]], *, may_be_unknown: bool) -> None:
        """`sent_weights`: Board.sent_weights; `may_be_unknown`: whether the run's engines compute no checksums."""
        self._sent_weights = sent_weights
        self._may_be_unknown = may_be_unknown
        self._sent: Mapping[int, Sequence[str]] = {}
        """The last answer of `sent_weights`, without newer versions."""

    def problem(self, group: TrainGroup, oldest: int) -> str:
        """Return a description of the first receipt that is missing or names weights that were never sent; "" if none.

        Versions before `oldest` are too old to be trained on, and the board has forgotten their digests: their receipts
        are not compared. Raises BoardError.
        """
        try:
            receipts = [[Receipt(*one) for one in sample] for sample in group.columns[WEIGHT_RECEIPTS]]
            compared = sorted({one for sample in receipts for one in sample if one.version >= oldest})
        except TypeError:
            return f"{WEIGHT_RECEIPTS} must have [version, digest, engine] for each of a sample's weights"
        for receipt in compared:
            if problem := self._refusal(receipt):
                return problem
        for sample, version in sorted(written_by(group)):
            if all(one.version != version for one in receipts[sample]):
                return f"sample {sample} has tokens of version {version}, but no receipt for it"
        return ""

    def _refusal(self, receipt: Receipt) -> str:
        version, digest, engine = receipt
        if not digest:
            unknown = f"{engine} wrote tokens of version {version}, but doesn't know the digest of its weights"
            return "" if self._may_be_unknown else unknown
        if digest not in self._sent.get(version, ()):
            self._sent = self._sent_weights()
        if digest in self._sent.get(version, ()):
            return ""
        others = [other for other, digests in self._sent.items() if digest in digests]
        since = f" since version {min(self._sent)}" if min(self._sent, default=0) > 0 else ""
        was = f"was sent as version {max(others)}" if others else f"no trainer of this run has sent{since}"
        return f"{engine} wrote tokens of version {version} with weights of digest {digest}, which {was}"


def written_by(group: TrainGroup) -> set[tuple[int, int]]:
    """Return the distinct (sample, version) pairs of all trained tokens."""
    trained = group.columns["loss_mask"] != 0
    samples = np.repeat(group.columns["sample_of_sequence"], group.lengths)[trained]
    versions = group.columns["versions"][trained]
    # Most neighbours are equal: keep only the first of each run of equal ones.
    first = np.ones(len(versions), bool)
    first[1:] = (versions[1:] != versions[:-1]) | (samples[1:] != samples[:-1])
    return set(zip(samples[first].tolist(), versions[first].tolist(), strict=True))
