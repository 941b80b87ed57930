"""Members of the next weight synchronisation: when it is due, which engines are excluded after failures, and which
engines join."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from relaxd.waiting import Backoff
from services.coordinator.fleet.registry import Version
from services.coordinator.state.records import GroupRecord, Member

logger = logging.getLogger(__name__)

QUIET_SHARE = 0.5
"""Pause without further arrivals after which waiting engines join, as a multiple of the time to connect a group."""
MOST_SHARE = 4.0
"""Maximum wait of an engine before it joins, as a multiple of the time to connect a group."""


class JoinBatcher:
    """Lets engines that arrive one after the other join the weight group together.

    Every change of membership reconnects all members, so 500 engines arriving within a minute could cause hundreds of
    reconnections. New engines therefore wait, in proportion to the time that connecting takes; in a small fleet they
    hardly wait. If the group must be reconnected anyway, all of them join at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Member, float] = {}
        """Time at which each engine was first seen."""
        self.connect_seconds = 0.0
        """Seconds that it took to connect the last group."""
        self.due_seconds = float("inf")
        """Seconds until the engines that `admit` left out may join."""

    def admit(self, trainer: Member, engines: Sequence[Member], group: GroupRecord | None) -> list[Member]:
        """Return the engines to synchronise now: all, or only those of the connected group."""
        now = self._clock()
        self._seen = {engine: self._seen.get(engine, now) for engine in engines}
        self.due_seconds = float("inf")
        if group is None or group.trainer != trainer:
            return list(engines)
        members = set(group.engines)
        waiting = [seen for engine, seen in self._seen.items() if engine not in members]
        if not waiting or not members <= self._seen.keys():
            return list(engines)
        quiet = max(waiting) + QUIET_SHARE * self.connect_seconds - now
        most = min(waiting) + MOST_SHARE * self.connect_seconds - now
        if min(quiet, most) <= 0:
            return list(engines)
        self.due_seconds = min(quiet, most)
        return [engine for engine in engines if engine in members]


EXCLUSION = Backoff(first_seconds=5.0, max_seconds=60.0)
"""Duration of an engine's exclusion, in seconds; it grows with the engine's consecutive failures."""


class ExcludedEngines:
    """Counts the failures of engines and temporarily excludes the blamed ones."""

    def __init__(self) -> None:
        self._blame: dict[Member, tuple[int, float]] = {}
        """Consecutive failures of each engine, and the monotonic time until which it is excluded."""
        self.refusals: Counter[Member] = Counter()
        """Number of failures since the last success in which this engine answered with an error and no member was dead
        or late. They don't exclude the engine."""

    def members(self) -> list[Member]:
        """Return the engines that are excluded now."""
        now = time.monotonic()
        return [member for member, (_, until) in self._blame.items() if until > now]

    def failures(self, member: Member) -> int:
        """Return the number of consecutive synchronisations that failed most likely because of this member."""
        return self._blame.get(member, (0, 0.0))[0] + self.refusals[member]

    def blame(self, members: Iterable[Member], known: Callable[[Member], bool]) -> None:
        """Exclude members, for longer after each failure, and forget members that aren't in `known`."""
        for member in members:
            failures = self._blame.get(member, (0, 0.0))[0] + 1
            seconds = EXCLUSION.pause(failures)
            self._blame[member] = (failures, time.monotonic() + seconds)
            logger.warning("%s is excluded from weight synchronisation for %.0f s", member.replica_id, seconds)
        self._blame = {member: value for member, value in self._blame.items() if known(member)}

    def forgive(self, member: Member) -> None:
        """Forget the failures of a member that has taken part in a synchronisation."""
        self._blame.pop(member, None)


def is_due(announced: Version, served: Sequence[Version | None], *, interval: int, last: int) -> bool:
    """Return True if the engines should get the announced weights now.

    Weights are due every `interval` versions after the oldest version that an engine serves. They are due at once if an
    engine serves no version of this term: it has joined, was quarantined, or another trainer has taken over. The gate
    admits prompts for max_staleness + 1 >= interval steps after that oldest version, so the steps until the next
    synchronisation can always be filled.

    Args:
        announced: the trainer's newest weights.
        served: version that each engine serves; None: it serves none.
        interval: weights.interval.
        last: version of the run's last step, which is always sent.
    """
    term, version = announced
    if any(one is None or one[0] != term for one in served):
        return True
    behind = version - min((one[1] for one in served if one is not None), default=version)
    return behind >= interval or (behind > 0 and version >= last)
