"""The trainer's groups from the board, until a step takes them or they are outdated and sent back.

With a critic service, a group's values come from a critic that was trained up to some step. At step s, the values are
too old if that critic lacks more than roles.critic.max_value_staleness of the steps before s: the group goes back to
the critic's stage and returns with new values.

With a reference service that adopts the policy's weights, a group was scored with the reference's weights at that time.
At step s all groups must have been scored with the weights that the reference adopted last before s: other groups go
back to the reference.
"""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from relaxd.algorithms import create
from relaxd.board import REFERENCE_WEIGHTS, TRAIN, Board, BoardUnavailable, Delivery, DropReason
from relaxd.config import RunConfig
from relaxd.engines import ENGINES
from relaxd.media.media_tokens import MediaTokens
from relaxd.roles import CRITIC, REFERENCE, ROLES, TEACHER
from services.trainer.batch.groups import MalformedGroup, RoutingShape, check_group, model_of
from services.trainer.batch.step_membership import (
    DeliveredGroup,
    GroupRefusals,
    ReceiptCheck,
    Selection,
    choose,
    due_groups,
    may_close,
    oldest_allowed,
)

logger = logging.getLogger(__name__)

MAX_GROUPS_PER_READ = 64
"""Maximum number of groups in one read."""


class TrainingQueue:
    """The groups that the trainer holds. A thread renews their leases."""

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
        """Number of held groups."""
        return len(self._held)

    def take(self, step: int, block_seconds: float) -> bool:
        """Take waiting groups for a step, or wait up to `block_seconds` for the first. Returns whether there were any.

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
        """Return and reset the number of groups that went back to a role: the critic or the reference."""
        return self._redone.pop(role, 0)

    def lost(self, members: Collection[str]) -> list[str]:
        """Return the step's groups that the board no longer counts as held; with any, the step can't be committed."""
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
        """Return all groups to the board, so that another trainer can take them at once."""
        with self._lock:
            deliveries = [taken.delivery for taken in self._held.values()]
            self._held.clear()
        if deliveries:
            self._board.nack(TRAIN, self._consumer, deliveries)

    def close(self) -> None:
        """Stop renewing leases."""
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
        """Forget the groups held by these deliveries, except those that have since been delivered again."""
        with self._lock:
            for delivery in deliveries:
                held = self._held.get(delivery.group_id)
                if held is not None and held.delivery is delivery:
                    del self._held[delivery.group_id]
