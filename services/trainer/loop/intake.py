"""Intake of groups from the board: which groups a step gets, which are too old, when the step may close.

The staleness of a token in step s is (s - 1) - version and must not exceed max_staleness. At step s a group is

- too old if its oldest trained token has a version below (s - 1) - max_staleness: it is dropped, its prompt retried;
- due if it would be too old at step s + 1: the step must take it, and waits for it if it is still being generated or
  scored. Slow groups have long answers; dropping them would train the model towards short ones.

A step takes groups until it has groups_per_step of them and no open group is due. Places are reserved for due groups,
so a step exceeds groups_per_step only if more groups than that are due.

With a critic service, a group's values are those of a critic that has seen some steps. At step s those of a critic that
lacks more than roles.critic.max_value_staleness of the steps before s are too old: the group goes back to the critic's
stage, and comes again with new values.

With a reference service that takes over the policy's weights, a group was scored with those that it had by then. At
step s all groups must have been scored with those that the reference took over last before s: others go back to it.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.board import CRITIC_STATE, REFERENCE_WEIGHTS, TRAIN, Board, BoardUnavailable, Delivery, DropReason
from relaxd.board.worker import Drop
from relaxd.roles import CRITIC, REFERENCE, ROLES
from services.trainer.batch.groups import MalformedGroup, RoutingShape, TrainGroup, check_group

logger = logging.getLogger(__name__)

MAX_GROUPS_PER_READ = 64
"""Largest number of groups in one read."""


@dataclass(frozen=True)
class HeldGroup:
    """A group that the trainer holds."""

    delivery: Delivery
    """Its delivery."""
    group: TrainGroup
    """Its columns."""
    arrival: int
    """Number of the group in the order of arrival."""
    oldest_version: int | None = None
    """`TrainGroup.oldest_version`, which reads all tokens: found out once, not whenever the trainer chooses groups."""

    @property
    def critic_step(self) -> int:
        """The last step on which the critic was trained that gave the values, in a run with a critic service."""
        return int(self.group.columns[CRITIC_STATE]["step"])


@dataclass(frozen=True)
class Selection:
    """Groups chosen for a step."""

    chosen: list[HeldGroup]
    """Groups that the step takes now."""
    may_close: bool
    """Whether the step is then complete and need not wait for more."""


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
    ready: Collection[HeldGroup], members: Collection[str], due: Collection[str], groups_per_step: int
) -> list[HeldGroup]:
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
    """Return whether the step has enough groups and no other open group is due."""
    return len(members) >= groups_per_step and not set(due) - set(members)


class Intake:
    """The groups that the trainer holds. A thread renews their leases."""

    def __init__(
        self,
        board: Board,
        consumer: str,
        *,
        groups_per_step: int,
        max_staleness: int,
        max_sequence_tokens: int,
        lease_seconds: float,
        routing: RoutingShape | None = None,
        max_value_staleness: int | None = None,
        teacher_of: Callable[[Mapping[str, Any]], str] | None = None,
        refusal: Callable[[TrainGroup], Drop | None] = lambda group: None,
    ) -> None:
        """Take groups as `consumer`; drop groups with a sequence longer than `max_sequence_tokens`.

        `routing` is what their routed experts must fit, if the run has them; `max_value_staleness` is that of a critic
        service, if the run has one; `teacher_of` names the teacher of a group, if the trainer has teachers. Groups for
        which it raises ValueError are dropped, and those for which `refusal` says why (`Admission`).
        """
        self._board = board
        self._columns = board.needs(TRAIN)
        self._consumer = consumer
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._max_sequence_tokens = max_sequence_tokens
        self._routing = routing
        self._max_value_staleness = max_value_staleness
        self._teacher_of = teacher_of
        self._refusal = refusal
        self._redone: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._held: dict[str, HeldGroup] = {}
        self._arrivals = 0
        self._stopped = threading.Event()
        self._renewer = threading.Thread(
            target=self._renew_forever, args=(lease_seconds / 4,), name="renew-leases", daemon=True
        )
        self._renewer.start()

    @property
    def held(self) -> int:
        """Number of held groups."""
        return len(self._held)

    def take(self, block_seconds: float) -> bool:
        """Take waiting groups, or wait up to `block_seconds` for the first. Returns whether there were any.

        Groups that can't be trained on are dropped.
        """
        deliveries = self._board.take(TRAIN, self._consumer, count=MAX_GROUPS_PER_READ, block_seconds=block_seconds)
        if not deliveries:
            return False
        for delivery, columns in zip(deliveries, self._board.load(deliveries, self._columns), strict=True):
            if columns is None:  # closed since it was taken
                continue
            try:
                group = check_group(delivery.group_id, columns, self._columns, self._routing)
            except MalformedGroup as error:
                logger.error("group %s is dropped: %s", delivery.group_id, error)
                self._board.drop(delivery, reason=DropReason.MALFORMED)
                continue
            longest = max(group.sequence_tokens)
            if longest > self._max_sequence_tokens:
                logger.error(
                    "group %s is dropped: a sequence has %d tokens with its prompt, but trainer.micro_batch_tokens is "
                    "%d: raise it, or limit prompts and answers to fewer tokens",
                    delivery.group_id,
                    longest,
                    self._max_sequence_tokens,
                )
                self._board.drop(delivery, reason=DropReason.TOO_LONG)
                continue
            try:
                if self._teacher_of is not None:
                    self._teacher_of(columns)
            except ValueError as error:
                logger.error("group %s is dropped: %s", delivery.group_id, error)
                self._board.drop(delivery, reason=DropReason.NO_LOGPROBS, detail=str(error))
                continue
            if (refused := self._refusal(group)) is not None:
                if not refused.filtered:
                    logger.error("group %s is dropped: %s", delivery.group_id, refused.detail)
                self._board.drop(delivery, reason=refused.reason, counts=refused.counts, detail=refused.detail)
                continue
            self._arrivals += 1
            with self._lock:
                self._held[delivery.group_id] = HeldGroup(delivery, group, self._arrivals, group.oldest_version)
        return True

    def select(self, step: int, members: Collection[str], reference: str = "") -> Selection:
        """Choose the groups that a step takes now, and decide whether it may then close.

        Groups that are too old for the step are dropped and their prompts retried. Those with values that are too old
        go back to the critic, those that were scored with other weights to the reference.

        Args:
            step: the step.
            members: ids of the groups that it already has.
            reference: the weights with which a reference service must have scored its groups.
        """
        oldest = oldest_allowed(step, self._max_staleness)
        ready: list[HeldGroup] = []
        outdated: dict[str, list[HeldGroup]] = {}
        for taken in self._held_except(members):
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
        due = due_groups(step, self._max_staleness, self._board.open_versions())
        chosen = choose(ready, members, due, self._groups_per_step)
        everyone = {*members, *(taken.group.group_id for taken in chosen)}
        return Selection(chosen, may_close(everyone, due, self._groups_per_step))

    def take_redone(self, role: str) -> int:
        """Return and reset the number of groups that went back to the critic or the reference."""
        return self._redone.pop(role, 0)

    def lost(self, members: Collection[str]) -> list[str]:
        """Ask the board which of a step's groups are no longer held; the step can't be committed with them."""
        with self._lock:
            deliveries = [taken.delivery for group_id, taken in self._held.items() if group_id in members]
        held = self._board.renew(TRAIN, self._consumer, deliveries)
        return [group_id for group_id in members if group_id not in held]

    def forget(self, group_ids: Collection[str]) -> None:
        """Forget groups that were trained or dropped."""
        with self._lock:
            for group_id in group_ids:
                self._held.pop(group_id, None)

    def release_all(self) -> None:
        """Hand all groups back to the board, so that another trainer can take them at once."""
        with self._lock:
            deliveries = [taken.delivery for taken in self._held.values()]
            self._held.clear()
        if deliveries:
            self._board.nack(TRAIN, self._consumer, deliveries)

    def close(self) -> None:
        """Stop renewing leases."""
        self._stopped.set()
        self._renewer.join(timeout=10.0)

    def _outdated(self, taken: HeldGroup, step: int, reference: str) -> str:
        """Return the role whose numbers a group needs anew before a step trains on it; "" if it needs none."""
        limit = self._max_value_staleness
        if limit is not None and taken.critic_step < oldest_allowed(step, limit):
            return CRITIC
        return REFERENCE if taken.group.columns.get(REFERENCE_WEIGHTS, reference) != reference else ""

    def _send_back(self, outdated: Sequence[HeldGroup], role: str, step: int) -> None:
        logger.info("%d groups go back to the %s: step %d needs newer numbers of it", len(outdated), role, step)
        deliveries = [taken.delivery for taken in outdated]
        self._board.redo(TRAIN, self._consumer, deliveries, again=ROLES[role].stage)
        self._redone[role] += len(outdated)
        self.forget([taken.group.group_id for taken in outdated])

    def _held_except(self, members: Collection[str]) -> list[HeldGroup]:
        with self._lock:
            return [taken for group_id, taken in self._held.items() if group_id not in members]

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
        """Forget the groups that are held by these deliveries, but not those that have come again meanwhile."""
        with self._lock:
            for delivery in deliveries:
                held = self._held.get(delivery.group_id)
                if held is not None and held.delivery is delivery:
                    del self._held[delivery.group_id]
