"""What the board hands out and takes in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

JSON: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A value that JSON can express."""

Column: TypeAlias = np.ndarray | JSON
"""A column's value: an array, or any JSON value. Arrays that were loaded are read-only views."""

DropKind: TypeAlias = Literal["failed", "filtered", ""]
"""Which drops in a row a dropped group adds to: failures, groups that the algorithm filtered, or neither."""


@dataclass(frozen=True)
class NewGroup:
    """A prompt to publish."""

    group_id: str
    """Unique in the run, for ever; printable, without spaces."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """The prompt's columns. Not used when `retry_of` is given: the prompt is on the board already."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Trace context of the publish span; every stage's delivery carries it."""
    worst_bytes: int = 0
    """How large the group can become (see `relaxd.board.sizes`). The gate reserves room for it."""
    retry_of: str | None = None
    """The dropped group (one of `Board.retries()`) whose prompt this group tries again."""


@dataclass(slots=True)
class Delivery:
    """A group that a consumer holds at a stage."""

    group_id: str
    entry_id: str
    """The stream entry; changes when a group is handed back and taken again."""
    stage: str
    consumer: str
    attempt: int
    """1 for the first delivery of this group at this stage."""
    trace: dict[str, str]
    """Trace context of the publish span."""
    enqueued_at: int
    """When it was offered to the stage (or handed back), by Redis's clock, in microseconds of Unix time."""
    pointers: dict[str, str] = field(repr=False, compare=False)
    """Where the columns lie (the board's own)."""
    worked: tuple[int, int] | None = field(default=None, compare=False)
    """When the work on it began and ended, in microseconds of Unix time; kept on the board with the commit (see
    `relaxd.board.times`)."""


@dataclass(frozen=True)
class Admission:
    """What the gate lets in now."""

    room: int
    """How many groups."""
    limit: str
    """What holds back the next group: "closed", "weights", "staleness", "complete", "memory" or "full"."""
    detail: str
    """The same as a sentence, with the numbers."""


@dataclass(frozen=True)
class Retry:
    """A dropped group whose prompt waits for another try."""

    group_id: str
    retries: int
    """How often its prompt was tried again before; the next is number retries + 1."""


@dataclass(frozen=True)
class LedgerEntry:
    """A committed step."""

    step: int
    time: float
    """Seconds since the epoch of Unix, by Redis's clock."""
    term: int
    """The trainer term that committed it."""
    plan: dict[str, Any]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Counts:
    """The conservation law's terms, read at one moment."""

    published: int
    open: int
    """The cardinality of the set of open groups: counted, not derived."""
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]
    last_step: int
    consecutive_drops: int
    """Groups that failed since the last committed step."""
    consecutive_filtered: int
    """Sound groups that the algorithm had no use for, since the last committed step."""

    def check(self) -> None:
        """Raise AssertionError unless published = open + trained + dropped."""
        if self.published != self.open + self.trained + self.dropped:
            raise AssertionError(
                f"groups were lost or doubled: published {self.published} is not open {self.open} + trained "
                f"{self.trained} + dropped {self.dropped}"
            )


@dataclass(frozen=True)
class QueueDepth:
    """How many groups wait for a stage and are held in it."""

    stage: str
    waiting: int
    held: int


@dataclass(frozen=True)
class DroppedGroup:
    """What is kept of a dropped group."""

    group_id: str
    reason: str
    stage: str
    """The stage that dropped it; empty when it was dropped by its id."""
    attempt: int
    """Deliveries at that stage."""
    time: float
    """Seconds since the epoch of Unix."""
    retried: bool
    """Its prompt is (or was) tried again."""
    columns: dict[str, Column]
    """The prompt's columns, where they were small enough to keep (64 KiB)."""
