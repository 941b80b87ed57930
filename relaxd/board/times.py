"""Times of a group in each stage, stored on the board with the group.

A stage's commit adds when the group was enqueued (Redis's clock, whole milliseconds) and when work on it started and
ended (the replica's clock): the same instants as in its spans. An attempt that was handed back adds nothing; the next
one counts from when the group was enqueued again.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class StageTime:
    """Times of one group in one stage, in microseconds of Unix time."""

    enqueued_at: int
    started_at: int
    ended: int

    @property
    def queue_seconds(self) -> float:
        """Time that the group waited; never negative, though the machines' clocks may differ."""
        return max(0.0, (self.started_at - self.enqueued_at) / MICROSECONDS)

    @property
    def work_seconds(self) -> float:
        """Time that the stage worked on the group."""
        return (self.ended - self.started_at) / MICROSECONDS


@dataclass(frozen=True)
class GroupTimes:
    """Times of one group in all stages."""

    published: int
    """Time of publishing by Redis's clock, in microseconds of Unix time."""
    stages: dict[str, StageTime]
    """By stage, for those that have committed."""


def microseconds() -> int:
    """Return the current time in microseconds of Unix time."""
    return time.time_ns() // 1000


def parse_times(published: bytes, stages: Mapping[str, bytes]) -> GroupTimes:
    """Parse a group's times: when it was published, and "<enqueued_at> <started_at> <ended>" of each stage."""
    return GroupTimes(int(published), {stage: StageTime(*map(int, text.split())) for stage, text in stages.items()})
