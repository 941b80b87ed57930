"""The trainer's groups from the board, until a step takes them or they are outdated and sent back; which groups a step
takes, and when it may close.

With a critic service, a group's values come from a critic that was trained up to some step. At step s, the values are
too old if that critic lacks more than roles.critic.max_value_staleness of the steps before s: the group goes back to
the critic's stage and returns with new values.

With a reference service that adopts the policy's weights, a group was scored with the reference's weights at that time.
At step s all groups must have been scored with the weights that the reference adopted last before s: other groups go
back to the reference.

The staleness of a token in step s is (s - 1) - version and must not exceed max_staleness. At step s a group is

- too old if its oldest trained token has a version below (s - 1) - max_staleness: it is dropped, its prompt retried;
- due if it would be too old at step s + 1: the step must take it, and waits for it if it is still being generated or
  scored. Slow groups have long answers; dropping them would train the model towards short ones.

A step takes groups until it has groups_per_step of them and no open group is due. Places are reserved for due groups,
so a step exceeds groups_per_step only if more groups than that are due.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from relaxd.algorithms import Algorithm, AlgorithmError, create
from relaxd.algorithms.results import filtered_by, token_weights_of
from relaxd.board import (
    ADVANTAGES,
    CRITIC_STATE,
    LOSS_MASK,
    REFERENCE_WEIGHTS,
    TRAIN,
    WEIGHT_RECEIPTS,
    Board,
    BoardUnavailable,
    Delivery,
    DropReason,
    stages_for,
)
from relaxd.board.worker import Drop
from relaxd.config import RunConfig
from relaxd.config.algorithm import OwnConfig
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from relaxd.engines import ENGINES
from relaxd.media.media_tokens import MediaTokens
from relaxd.roles import CRITIC, REFERENCE, ROLES, TEACHER
from relaxd.weights.receipts import Receipt
from services.trainer.batch.groups import MalformedGroup, RoutingShape, TrainGroup, check_group, model_of


@dataclass(frozen=True)
class DeliveredGroup:
    """A group that the trainer has taken from the board and holds for a step."""

    delivery: Delivery
    """The board's delivery of the group to this trainer."""
    group: TrainGroup
    """The group's columns, after validation."""
    arrival: int
    """Number of the group in the order of arrival."""
    oldest_version: int | None = None
    """`TrainGroup.oldest_version`, computed once because it reads all tokens."""

    @property
    def critic_step(self) -> int:
        """Last step that trained the critic that computed the group's values; for runs with a critic service."""
        return int(self.group.columns[CRITIC_STATE]["step"])


@dataclass(frozen=True)
class Selection:
    """Groups that a step takes, and whether the step may then close."""

    chosen: list[DeliveredGroup]
    """Groups that the step takes now."""
    may_close: bool
    """True if the step is complete with these groups and need not wait for others."""


def oldest_allowed(step: int, max_staleness: int) -> int:
    """Return the oldest weight version whose tokens a step may train on."""
    return step - 1 - max_staleness


def due_groups(step: int, max_staleness: int, open_versions: Mapping[str, int]) -> set[str]:
    """Return the ids of open groups whose tokens would be too old for the step after `step`.

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
        """Create the checks for a run's groups.

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
        """Return the reason for which a group must be dropped, or None if a step may train on it."""
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
    """Checks that the receipts of groups name weights that were really sent, by digest.

    The board keeps the digests of versions that a step may still train on.
    """

    def __init__(self, sent_weights: Callable[[], Mapping[int, Sequence[str]]], *, may_be_unknown: bool) -> None:
        """`sent_weights`: Board.sent_weights; `may_be_unknown`: True if receipts may lack a digest, because the run's
        engines compute no checksums."""
        self._sent_weights = sent_weights
        self._may_be_unknown = may_be_unknown
        self._sent: Mapping[int, Sequence[str]] = {}
        """Cached answer of `sent_weights`. Versions sent since the call are missing."""

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


logger = logging.getLogger(__name__)

MAX_GROUPS_PER_READ = 64
"""Maximum number of groups that the trainer reads from the board in one call."""


class TrainingQueue:
    """Takes groups from the board and holds them until a step trains them. A thread renews their leases."""

    def __init__(
        self,
        board: Board,
        consumer: str,
        config: RunConfig,
        *,
        routing: RoutingShape | None = None,
        media: MediaTokens | None = None,
        vocab_sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take groups as `consumer`, and drop groups that can't be trained on.

        Args:
            board: the run's board.
            consumer: the replica's id.
            config: the run's configuration.
            routing: shape that groups' routed experts must fit, if the run has them.
            media: the model's tokens for media, if it takes any.
            vocab_sizes: `Learner.vocab_sizes`.

        Raises:
            FilterError: data.curriculum.filter can't be imported, or isn't a function.
        """
        self._board = board
        self._columns = board.needs(TRAIN)
        self._consumer = consumer
        self._config = config
        self._routing, self._media = routing, media
        algorithm, critic = create(config.algorithm), config.roles.critic
        candidates = algorithm.needs.candidates
        self._candidates = None if candidates is None else candidates.width
        self._max_value_staleness = critic.max_value_staleness if critic.placement == "service" else None
        self._has_teachers = TEACHER in config.frozen_roles("trainer")
        unknown = not ENGINES[config.rollout.engine].gives_checksums
        self._receipts = (
            ReceiptCheck(board.sent_weights, may_be_unknown=unknown) if config.weights.has_receipts else None
        )
        self._refusals = GroupRefusals(config, algorithm, vocab_sizes)
        self._redone: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._held: dict[str, DeliveredGroup] = {}
        self._arrivals = 0
        self._stopped = threading.Event()
        self._renewer = threading.Thread(
            target=self._renew_forever, args=(config.board.lease_seconds / 4,), name="renew-leases", daemon=True
        )
        self._renewer.start()

    @property
    def held(self) -> int:
        """Number of groups that the trainer holds."""
        return len(self._held)

    def take(self, step: int, block_seconds: float) -> bool:
        """Take waiting groups from the board, or wait up to `block_seconds` for the first. Return True if any came.

        Groups that can't be trained on are dropped.
        """
        deliveries = self._board.take(TRAIN, self._consumer, count=MAX_GROUPS_PER_READ, block_seconds=block_seconds)
        if not deliveries:
            return False
        oldest = oldest_allowed(step, self._config.board.max_staleness)
        for delivery, columns in zip(deliveries, self._board.load(deliveries, self._columns), strict=True):
            if columns is None:  # closed since it was taken
                continue
            try:
                group = check_group(
                    delivery.group_id, columns, self._columns, self._routing, self._candidates, self._media
                )
            except MalformedGroup as error:
                logger.error("group %s is dropped: %s", delivery.group_id, error)
                self._board.drop(delivery, reason=DropReason.MALFORMED, detail=str(error))
                continue
            if self._receipts is not None and (problem := self._receipts.problem(group, oldest)):
                logger.error("group %s is dropped: %s", delivery.group_id, problem)
                self._board.drop(delivery, reason=DropReason.WRONG_WEIGHTS, retry=True, detail=problem)
                continue
            longest = max(group.sequence_tokens)
            if longest > self._config.micro_batch_tokens:
                logger.error(
                    "group %s is dropped: a sequence has %d tokens with its prompt, but trainer.micro_batch_tokens is "
                    "%d: raise it, or limit prompts and answers to fewer tokens",
                    delivery.group_id,
                    longest,
                    self._config.micro_batch_tokens,
                )
                self._board.drop(delivery, reason=DropReason.TOO_LONG)
                continue
            try:
                if self._has_teachers:
                    model_of(self._config, TEACHER, columns)
            except ValueError as error:
                logger.error("group %s is dropped: %s", delivery.group_id, error)
                self._board.drop(delivery, reason=DropReason.NO_LOGPROBS, detail=str(error))
                continue
            if (refused := self._refusals.refusal(group)) is not None:
                if not refused.filtered:
                    logger.error("group %s is dropped: %s", delivery.group_id, refused.detail)
                self._board.drop(delivery, reason=refused.reason, counts=refused.counts, detail=refused.detail)
                continue
            self._arrivals += 1
            with self._lock:
                self._held[delivery.group_id] = DeliveredGroup(delivery, group, self._arrivals, group.oldest_version)
        return True

    def select(self, step: int, members: Collection[str], reference: str = "") -> Selection:
        """Choose the groups that a step takes now, and decide whether it may then close.

        Groups that are too old for the step are dropped and their prompts retried. Groups with outdated values go back
        to the critic, groups scored with other weights to the reference.

        Args:
            step: the step.
            members: ids of the groups that the step already has.
            reference: name of the weights with which a reference service must have scored the step's groups.
        """
        oldest = oldest_allowed(step, self._config.board.max_staleness)
        ready: list[DeliveredGroup] = []
        outdated: dict[str, list[DeliveredGroup]] = {}
        with self._lock:
            others = [taken for group_id, taken in self._held.items() if group_id not in members]
        for taken in others:
            version = taken.oldest_version
            if version is not None and version < oldest:
                logger.warning(
                    "group %s is dropped: it has tokens of version %d, but step %d accepts versions from %d on",
                    taken.group.group_id,
                    version,
                    step,
                    oldest,
                )
                self._board.drop(taken.delivery, reason=DropReason.STALE, retry=True)
                self.forget([taken.group.group_id])
            elif role := self._outdated(taken, step, reference):
                outdated.setdefault(role, []).append(taken)
            else:
                ready.append(taken)
        for role, groups in outdated.items():
            self._send_back(groups, role, step)
        due = due_groups(step, self._config.board.max_staleness, self._board.open_versions())
        chosen = choose(ready, members, due, self._config.trainer.groups_per_step)
        everyone = {*members, *(taken.group.group_id for taken in chosen)}
        return Selection(chosen, may_close(everyone, due, self._config.trainer.groups_per_step))

    def take_redone(self, role: str) -> int:
        """Return and reset the number of groups sent back to a role (critic or reference) to be scored anew."""
        return self._redone.pop(role, 0)

    def lost(self, members: Collection[str]) -> list[str]:
        """Return the ids of the step's groups that this trainer no longer holds on the board.

        A step with such groups can't be committed.
        """
        with self._lock:
            deliveries = [taken.delivery for group_id, taken in self._held.items() if group_id in members]
        held = self._board.renew(TRAIN, self._consumer, deliveries)
        return [group_id for group_id in members if group_id not in held]

    def forget(self, group_ids: Collection[str]) -> None:
        """Stop holding groups that were trained or dropped."""
        with self._lock:
            for group_id in group_ids:
                self._held.pop(group_id, None)

    def release_all(self) -> None:
        """Return all groups to the board, so that another trainer can take them at once."""
        with self._lock:
            deliveries = [taken.delivery for taken in self._held.values()]
            self._held.clear()
        if deliveries:
            self._board.nack(TRAIN, self._consumer, deliveries)

    def close(self) -> None:
        """Stop the thread that renews the groups' leases."""
        self._stopped.set()
        self._renewer.join(timeout=10.0)

    def _outdated(self, taken: DeliveredGroup, step: int, reference: str) -> str:
        """Return the role that must recompute a group's columns before a step can use the group; "" if none must."""
        limit = self._max_value_staleness
        if limit is not None and taken.critic_step < oldest_allowed(step, limit):
            return CRITIC
        return REFERENCE if taken.group.columns.get(REFERENCE_WEIGHTS, reference) != reference else ""

    def _send_back(self, outdated: Sequence[DeliveredGroup], role: str, step: int) -> None:
        logger.info("%d groups go back to the %s: step %d needs newer numbers of it", len(outdated), role, step)
        deliveries = [taken.delivery for taken in outdated]
        self._board.redo(TRAIN, self._consumer, deliveries, again=ROLES[role].stage)
        self._redone[role] += len(outdated)
        self.forget([taken.group.group_id for taken in outdated])

    def _renew_forever(self, every_seconds: float) -> None:
        unavailable = False
        while not self._stopped.wait(every_seconds):  # idle: renews the leases
            with self._lock:
                deliveries = [taken.delivery for taken in self._held.values()]
            if not deliveries:
                continue
            try:
                still_held = self._board.renew(TRAIN, self._consumer, deliveries)
                unavailable = False
            except BoardUnavailable as error:
                if not unavailable:
                    logger.warning("can't renew the leases of %d groups: %s", len(deliveries), error)
                unavailable = True
                continue
            # Others have closed or taken these. A step that has one of them notices before it closes.
            self._forget_deliveries([delivery for delivery in deliveries if delivery.group_id not in still_held])

    def _forget_deliveries(self, deliveries: Collection[Delivery]) -> None:
        """Stop holding the groups of these deliveries. Keep a group that has been delivered again since."""
        with self._lock:
            for delivery in deliveries:
                held = self._held.get(delivery.group_id)
                if held is not None and held.delivery is delivery:
                    del self._held[delivery.group_id]
