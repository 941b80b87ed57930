"""Let new engines join the weight group, several at once."""

import time
from collections.abc import Callable, Sequence

from services.coordinator.state.records import GroupRecord, Member

QUIET_SHARE = 0.5
"""Newcomers join once none has come for this share of the time that connecting a group takes ..."""
MOST_SHARE = 4.0
"""... or once the first of them has waited for this multiple of it."""


class Newcomers:
    """Lets engines that come one after the other join the weight group together.

    Each change of the membership connects every member anew: five hundred engines that come within a minute would
    connect hundreds of groups of hundreds of members. They wait in proportion to what connecting takes, so that an
    engine that joins a small fleet hardly waits. Where the group must be connected anyway, all join at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Member, float] = {}
        """When each engine was seen first."""
        self.connect_seconds = 0.0
        """Seconds that connecting the last group took."""
        self.due_seconds = float("inf")
        """Time until those that `admit` left out may join."""

    def admit(self, trainer: Member, engines: Sequence[Member], group: GroupRecord | None) -> list[Member]:
        """Return the engines to synchronise now: all, or those of the group that is connected."""
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
