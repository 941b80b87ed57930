"""Where the time of a group went: what each stage took, kept on the board beside the group.

Every stage's commit adds when the group was enqueued for the stage (Redis's clock, whole milliseconds), and when the
stage began and ended to work on it (the clock of the replica's machine): the same instants as its spans have. A stage
that gave the group back adds nothing, and the stage's next attempt counts from when the group was enqueued again.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class StageTime:
    """What one stage took. All in microseconds of Unix time."""

    enqueued_at: int
    started_at: int
    ended: int

    @property
    def queue_seconds(self) -> float:
        """How long the group waited before the stage; never negative, though clocks of machines may differ."""
        return max(0.0, (self.started_at - self.enqueued_at) / MICROSECONDS)

    @property
    def work_seconds(self) -> float:
        """How long the stage worked on it."""
        return (self.ended - self.started_at) / MICROSECONDS


@dataclass(frozen=True)
class GroupTimes:
    """What the stages of one group took."""

    published: int
    """When it was published, by Redis's clock, in microseconds of Unix time."""
    stages: dict[str, StageTime]
    """By stage, those that have committed."""


def microseconds() -> int:
    """Now, in microseconds of Unix time."""
    return time.time_ns() // 1000


def parse_times(published: bytes, stages: Mapping[str, bytes]) -> GroupTimes:
    """Parse a group's times: when it was published, and "<enqueued_at> <started_at> <ended>" of each stage."""
    return GroupTimes(int(published), {stage: StageTime(*map(int, text.split())) for stage, text in stages.items()})
