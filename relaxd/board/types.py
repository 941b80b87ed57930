"""Arguments, results and errors of the board's operations, and the times of a group in each stage.

A stage's commit adds when the group was enqueued (Redis's clock, whole milliseconds) and when work on it started and
ended (the replica's clock): the same instants as in its spans. An attempt that was handed back adds nothing; the next
one counts from when the group was enqueued again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from relaxd.reasons import DropReason as DropReason

JSON: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A value that JSON can express."""

Column: TypeAlias = np.ndarray | JSON
"""A column's value: an array or any JSON value. Loaded arrays are read-only views."""

DropKind: TypeAlias = Literal["failed", "filtered", ""]
"""Which count of consecutive drops a drop increases: of failures, of groups filtered by the algorithm, or none."""
DROP_COUNTERS: dict[DropKind, str] = {"failed": "consecutive_drops", "filtered": "consecutive_filtered", "": ""}
"""Field of a run's state in Redis that has the count of consecutive drops, by kind of drop."""


@dataclass(frozen=True)
class NewGroup:
    """New group, a prompt with its columns, to be published on the board."""

    group_id: str
    """Id of the group: unique in the run's lifetime, printable, without spaces, commas or "|"."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """The prompt's columns. Unused with `retry_of`, whose prompt is already on the board."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Trace context of the span that created the group; every stage's delivery carries it."""
    worst_bytes: int = 0
    """Upper bound of the group's size (see `relaxd.board.sizes`), for which the gate reserves room."""
    retry_of: str | None = None
    """Id of the dropped group (one of `Board.retries()`) whose prompt this group retries."""
    facts: Mapping[str, JSON] = field(default_factory=dict)
    """Facts about the prompt for the record of the group's outcome. Unused with `retry_of`: that group's facts are on
    the board."""


@dataclass(slots=True)
class Delivery:
    """Delivery of a group to a consumer of a stage, which then holds the group."""

    group_id: str
    entry_id: str
    """Id of the group's entry in the stage's stream; a group that is handed back gets a new entry."""
    stage: str
    consumer: str
    attempt: int
    """Number of the delivery of this group at this stage, counted from 1."""
    trace: dict[str, str]
    """Trace context of the span that created the group."""
    enqueued_at: int
    """Time at which the group was offered to the stage or handed back: Redis's clock, microseconds of Unix time."""
    pointers: dict[str, str] = field(repr=False, compare=False)
    """Pointers to the payloads of the group's columns, by writer; internal to the board."""
    worked: tuple[int, int] | None = field(default=None, compare=False)
    """Start and end of the stage's work on the group, in microseconds of Unix time; stored with the commit."""


@dataclass(frozen=True)
class Saved:
    """Unfinished work on a group that its deliveries at a stage have saved, in parts."""

    pointers: str = ""
    """Pointers to the payloads of the saved parts; internal to the board."""
    parts: Sequence[Mapping[str, Column]] = ()
    """Columns of each saved part, in the order in which the parts were saved."""


@dataclass(frozen=True)
class Admission:
    """Number of groups that the gate admits now, and the limit that determines it."""

    room: int
    """Number of groups that may be published now."""
    limit: str
    """Name of the limit that determines `room`: "closed", "weights", "staleness", "complete", "memory" or "full"."""
    detail: str
    """Sentence for people that explains the limit, with its numbers."""


@dataclass(frozen=True)
class PromptRetry:
    """A dropped group whose prompt waits to be retried."""

    group_id: str
    retries: int
    """Number of times that the group's prompt has been retried."""


@dataclass(frozen=True)
class CriticOrders:
    """The current critic term, and the checkpoints that the trainer asks a critic service for."""

    term: int
    """The current critic term; 0 before the first."""
    checkpoint: int | None
    """Step of the trainer's latest checkpoint request; None before the first."""
    kept: int | None
    """Step of the latest request for a checkpoint that is never removed; None before the first."""


@dataclass(frozen=True)
class LedgerEntry:
    """A committed step, as the board's ledger records it."""

    step: int
    time: float
    """Unix time of the commit by Redis's clock, in seconds."""
    term: int
    """The trainer term that committed the step."""
    plan: dict[str, Any]
    metrics: dict[str, float]

    @property
    def identity(self) -> tuple[int, int, float]:
        """Step, term and time of the commit. They identify it: if Redis loses a step, its second commit differs."""
        return self.step, self.term, self.time


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of a run's groups, read in one transaction: published = open + trained + dropped."""

    published: int
    open: int
    """Number of open groups, counted rather than derived from the other counts."""
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]
    last_step: int
    consecutive_drops: int
    """Number of groups that failed since the last committed step."""
    consecutive_filtered: int
    """Number of groups that the algorithm filtered since the last committed step."""

    def check(self) -> None:
        """Raise AssertionError unless published = open + trained + dropped."""
        if self.published != self.open + self.trained + self.dropped:
            raise AssertionError(
                f"groups were lost or duplicated: published {self.published} is not open {self.open} + trained "
                f"{self.trained} + dropped {self.dropped}"
            )


@dataclass(frozen=True)
class QueueDepth:
    """Numbers of groups that wait for a stage, and that its consumers hold."""

    stage: str
    waiting: int
    held: int


@dataclass(frozen=True)
class HeldGroup:
    """A group held at a stage, with its holder and since when."""

    group_id: str
    holder: str
    """Name of the consumer that holds the group."""
    enqueued_at: float
    """Unix time at which the group was offered to the stage, by Redis's clock."""
    idle_seconds: float = 0.0
    """Time since the lease on the group was last renewed, in seconds."""
    deliveries: int = 1


@dataclass(frozen=True)
class GroupOutcome:
    """Outcome of a closed group: trained in which step, or dropped for which reason."""

    entry_id: str
    """Id of the outcome's entry in the board's stream of outcomes."""
    record: dict[str, Any]
    """Record of the outcome: `group`; `step` if the group was trained, else `reason`, `stage`, `attempt` and `retried`;
    the group's facts (`NewGroup.facts`, relaxd.board.group_contents); and `trace_id` if it is traced."""

    @property
    def line(self) -> dict[str, Any]:
        """Line of the run's groups.jsonl for this outcome, as JSON values."""
        return {**self.record, "entry": self.entry_id}


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """Record of a dropped group."""

    group_id: str
    reason: str
    stage: str
    """Name of the stage that dropped the group; "" if it was dropped by its id, without a delivery."""
    attempt: int
    """Number of times that the group was delivered at that stage."""
    time: float
    """Unix time of the drop, in seconds."""
    retried: bool
    """True if the prompt was queued for a retry."""
    columns: dict[str, Column]
    """The prompt's columns, unless they exceed 64 KiB."""
    detail: str = ""
    """Error text of the drop, for people."""


MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class StageTime:
    """Times at which a group was offered to a stage, and work on it began and ended; microseconds of Unix time."""

    enqueued_at: int
    started_at: int
    ended: int

    @property
    def queue_seconds(self) -> float:
        """Seconds that the group waited for the stage; never negative, though the machines' clocks may differ."""
        return max(0.0, (self.started_at - self.enqueued_at) / MICROSECONDS)

    @property
    def work_seconds(self) -> float:
        """Seconds that the stage worked on the group."""
        return (self.ended - self.started_at) / MICROSECONDS


@dataclass(frozen=True)
class GroupTimes:
    """Times of one group in all stages."""

    published: int
    """Time at which the group was published, by Redis's clock, in microseconds of Unix time."""
    stages: dict[str, StageTime]
    """The group's times in each stage that has committed, by stage."""


def microseconds() -> int:
    """Return the current time in microseconds of Unix time."""
    return time.time_ns() // 1000


def parse_times(published: bytes, stages: Mapping[str, bytes]) -> GroupTimes:
    """Parse a group's times as Redis has them: of publishing, and "<enqueued_at> <started_at> <ended>" by stage."""
    return GroupTimes(int(published), {stage: StageTime(*map(int, text.split())) for stage, text in stages.items()})


class BoardError(Exception):
    """Base of the board's errors."""


class ColumnError(BoardError):
    """A column cannot be stored, or stored bytes do not match their header."""


class ColumnsTooLarge(ColumnError):
    """Columns exceed board.max_group_bytes."""


class Fenced(BoardError):
    """The caller's term has ended because another process took over. The caller must stop writing."""


class StepConflict(BoardError):
    """A step can't be committed: it isn't the next one, or its plan names a group that isn't open, or one twice."""


class LedgerTrimmed(BoardError):
    """The board has trimmed the requested steps from its ledger; the run's folder has them. `first`: the first step
    that the ledger still has."""

    def __init__(self, first: int, message: str) -> None:
        super().__init__(message)
        self.first = first


class RunExists(BoardError):
    """The run already exists on the board with other settings."""


class RunMissing(BoardError):
    """The run isn't on the board: it was never created, or was deleted."""


class BoardUnavailable(BoardError):
    """Redis is unavailable, after retries. Repeating the operation is safe."""


class TooLate(BoardError):
    """Writing large payloads took so long that they were given up: they must be written again."""


class GateClosed(BoardError):
    """The gate refuses to publish; `limit` and `detail` are those of `relaxd.board.types.Admission`."""

    def __init__(self, limit: str, detail: str) -> None:
        super().__init__(f"the gate is closed ({limit}): {detail}")
        self.limit = limit
        self.detail = detail
