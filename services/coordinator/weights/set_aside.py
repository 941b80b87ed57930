"""Engines that are set aside: how long an engine is left out of weight synchronisations after it has failed one."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from relaxd.waiting import Backoff
from services.coordinator.state.records import Member

logger = logging.getLogger(__name__)

SET_ASIDE = Backoff(first_seconds=5.0, max_seconds=60.0)
"""An engine's exclusion, by its failures."""


class SetAside:
    """Counts the failures of engines and sets those to blame aside for a while."""

    def __init__(self) -> None:
        self._blame: dict[Member, tuple[int, float]] = {}
        """An engine's consecutive failures, and the monotonic time until which it is set aside."""
        self._refusals: Counter[Member] = Counter()
        """Failures since the last success with an error answer of a member and no dead or late one."""

    def members(self) -> list[Member]:
        """Return the engines that are set aside now."""
        now = time.monotonic()
        return [member for member, (_, until) in self._blame.items() if until > now]

    def failures(self, member: Member) -> int:
        """Return the consecutive synchronisations that failed, most likely because of this member."""
        return self._blame.get(member, (0, 0.0))[0] + self._refusals[member]

    def blame(self, members: Iterable[Member], known: Callable[[Member], bool]) -> None:
        """Set members aside, longer after each failure, and forget those that aren't `known` any more."""
        for member in members:
            failures = self._blame.get(member, (0, 0.0))[0] + 1
            seconds = SET_ASIDE.pause(failures)
            self._blame[member] = (failures, time.monotonic() + seconds)
            logger.warning("%s is excluded from weight synchronisation for %.0f s", member.replica_id, seconds)
        self._blame = {member: value for member, value in self._blame.items() if known(member)}

    def forgive(self, member: Member) -> None:
        """Forget the failures of a member that has taken part in a synchronisation."""
        self._blame.pop(member, None)

    def count_refusals(self, members: Iterable[Member]) -> None:
        """Count a failure with an error answer of these members, without setting them aside."""
        self._refusals.update(members)

    def forgive_refusals(self) -> None:
        """Forget error answers after a success."""
        self._refusals.clear()
