"""Taking groups from the board: which ones a step gets, which ones are too old, when it may close.

The staleness of a token in step s is (s - 1) - version, and must not be above max_staleness. So at step s a group is

- too old when its oldest trained token has a version below (s - 1) - max_staleness: dropped, its prompt tried again;
- due when it would be too old at step s + 1: the step has to take it. A group that is due and still being generated,
  scored and so on is waited for: what is slow is long, and a step that didn't wait would teach the model to be short.

A step takes groups until it has groups_per_step of them and no open group is due. Places are kept for groups that are
due, so that a step gets larger than groups_per_step only where more groups than that are due.
"""

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from relaxd.board import Board, BoardUnavailable, Delivery
from services.trainer.batch.groups import TRAIN_COLUMNS, Group, MalformedGroup, check_group

logger = logging.getLogger(__name__)

STAGE = "train"
TAKE_AT_ONCE = 64
"""Most groups in one read."""


@dataclass(frozen=True)
class Taken:
    """A group that the trainer holds."""

    delivery: Delivery
    """How it was delivered."""
    group: Group
    """Its columns."""
    arrival: int
    """Counts the groups in the order in which they were taken."""


@dataclass(frozen=True)
class Selection:
    """What a step gets now."""

    chosen: list[Taken]
    """Groups that it takes."""
    may_close: bool
    """Whether it has enough with them, and need not wait for any."""


def oldest_allowed(step: int, max_staleness: int) -> int:
    """The oldest version whose tokens may be trained on in a step."""
    return step - 1 - max_staleness


def due_groups(step: int, max_staleness: int, open_versions: Mapping[str, int]) -> set[str]:
    """Open groups that would be too old at the next step.

    Args:
        step: the step that is being filled.
        max_staleness: most versions between weights and training.
        open_versions: by id the oldest version of each open group whose generation has begun.
    """
    return {group for group, version in open_versions.items() if version < oldest_allowed(step + 1, max_staleness)}


def choose(
    ready: Collection[Taken], members: Collection[str], due: Collection[str], groups_per_step: int
) -> list[Taken]:
    """Which of the groups that are ready the step takes now: those that are due, then those that came first.

    Args:
        ready: groups that are held, none of them too old.
        members: ids of the groups that the step has.
        due: ids of the open groups that would be too old at the next step, members included.
        groups_per_step: how many groups a step has.
    """
    outstanding = set(due) - set(members)
    chosen = [taken for taken in ready if taken.group.group_id in outstanding]
    free = groups_per_step - len(members) - len(outstanding)
    others = sorted(
        (taken for taken in ready if taken.group.group_id not in outstanding), key=lambda taken: taken.arrival
    )
    return sorted(chosen, key=lambda taken: taken.arrival) + others[: max(free, 0)]


def may_close(members: Collection[str], due: Collection[str], groups_per_step: int) -> bool:
    """Whether the step has enough groups, and no open group that isn't in it is due."""
    return len(members) >= groups_per_step and not set(due) - set(members)


class Intake:
    """The groups that the trainer holds. A thread of its own renews the holds."""

    def __init__(
        self,
        board: Board,
        consumer: str,
        *,
        groups_per_step: int,
        max_staleness: int,
        max_sample_tokens: int,
        lease_seconds: float,
    ) -> None:
        """Take for `consumer`; a group with a sample of more than `max_sample_tokens` tokens is dropped."""
        self._board = board
        self._consumer = consumer
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._max_sample_tokens = max_sample_tokens
        self._lock = threading.Lock()
        self._held: dict[str, Taken] = {}
        self._arrivals = 0
        self._stopped = threading.Event()
        self._renewer = threading.Thread(
            target=self._renew_forever, args=(lease_seconds / 4,), name="renew-holds", daemon=True
        )
        self._renewer.start()

    @property
    def held(self) -> int:
        """Groups that are held."""
        return len(self._held)

    def take(self, block_seconds: float) -> bool:
        """Take the groups that wait, or the first one that comes within `block_seconds`. Returns whether any came.

        A group that can't be trained on is dropped.
        """
        deliveries = self._board.take(STAGE, self._consumer, count=TAKE_AT_ONCE, block_seconds=block_seconds)
        if not deliveries:
            return False
        for delivery, columns in zip(deliveries, self._board.load(deliveries, tuple(TRAIN_COLUMNS)), strict=True):
            if columns is None:  # closed since it was taken
                continue
            try:
                group = check_group(delivery.group_id, columns)
            except MalformedGroup as error:
                logger.error("group %s is dropped: %s", delivery.group_id, error)
                self._board.drop(delivery, reason="malformed")
                continue
            longest = max(group.sample_tokens)
            if longest > self._max_sample_tokens:
                logger.error(
                    "group %s is dropped: a sample has %d tokens with its prompt, but trainer.micro_batch_tokens is "
                    "%d: raise it, or allow shorter prompts and answers only",
                    delivery.group_id,
                    longest,
                    self._max_sample_tokens,
                )
                self._board.drop(delivery, reason="too_long")
                continue
            self._arrivals += 1
            with self._lock:
                self._held[delivery.group_id] = Taken(delivery, group, self._arrivals)
        return True

    def select(self, step: int, members: Collection[str]) -> Selection:
        """The groups that a step gets now, and whether it may close with them.

        Args:
            step: the step.
            members: ids of the groups that it has.

        Groups that are too old for the step are dropped; their prompts are tried again.
        """
        oldest = oldest_allowed(step, self._max_staleness)
        ready = []
        for taken in self._others(members):
            version = taken.group.oldest_version
            if version is not None and version < oldest:
                logger.warning(
                    "group %s is dropped: version %d wrote a token of it, and step %d allows none before version %d",
                    taken.group.group_id,
                    version,
                    step,
                    oldest,
                )
                self._board.drop(taken.delivery, reason="stale", retry=True)
                self.forget([taken.group.group_id])
            else:
                ready.append(taken)
        due = due_groups(step, self._max_staleness, self._board.open_versions())
        chosen = choose(ready, members, due, self._groups_per_step)
        everyone = {*members, *(taken.group.group_id for taken in chosen)}
        return Selection(chosen, may_close(everyone, due, self._groups_per_step))

    def lost(self, members: Collection[str]) -> list[str]:
        """Which of a step's groups aren't held any more, asked of the board: their part in the step is of no use."""
        with self._lock:
            deliveries = [taken.delivery for group_id, taken in self._held.items() if group_id in members]
        held = self._board.renew(STAGE, self._consumer, deliveries)
        return [group_id for group_id in members if group_id not in held]

    def forget(self, group_ids: Collection[str]) -> None:
        """Groups that were trained or dropped aren't held any more."""
        with self._lock:
            for group_id in group_ids:
                self._held.pop(group_id, None)

    def release_all(self) -> None:
        """Hand every group back to the board, for another trainer to take at once."""
        with self._lock:
            deliveries = [taken.delivery for taken in self._held.values()]
            self._held.clear()
        if deliveries:
            self._board.nack(STAGE, self._consumer, deliveries)

    def close(self) -> None:
        """Stop renewing holds."""
        self._stopped.set()
        self._renewer.join(timeout=10.0)

    def _others(self, members: Collection[str]) -> list[Taken]:
        with self._lock:
            return [taken for group_id, taken in self._held.items() if group_id not in members]

    def _renew_forever(self, every_seconds: float) -> None:
        away = False
        while not self._stopped.wait(every_seconds):
            with self._lock:
                deliveries = [taken.delivery for taken in self._held.values()]
            if not deliveries:
                continue
            try:
                still_held = self._board.renew(STAGE, self._consumer, deliveries)
                away = False
            except BoardUnavailable as error:
                if not away:
                    logger.warning("can't renew the holds of %d groups: %s", len(deliveries), error)
                away = True
                continue
            # Somebody else has closed these, or was faster. A step that has one of them finds out before it closes.
            self.forget([delivery.group_id for delivery in deliveries if delivery.group_id not in still_held])
