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
"""The consecutive-drop count that a drop increases: failures, groups filtered by the algorithm, or neither."""
DROP_COUNTERS: dict[DropKind, str] = {"failed": "consecutive_drops", "filtered": "consecutive_filtered", "": ""}
"""Field of a run's state in Redis for each count."""


@dataclass(frozen=True)
class NewGroup:
    """A prompt to publish."""

    group_id: str
    """Unique in the run's lifetime; printable, without spaces."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """The prompt's columns. Unused with `retry_of`, whose prompt is already on the board."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Trace context of the span that created the group; every stage's delivery carries it."""
    worst_bytes: int = 0
    """Upper bound of the group's size (see `relaxd.board.sizes`), for which the gate reserves room."""
    retry_of: str | None = None
    """The dropped group (one of `Board.retries()`) whose prompt this group retries."""
    facts: Mapping[str, JSON] = field(default_factory=dict)
    """Summary for the record of the group's outcome (`GroupOutcome`). Unused with `retry_of`, whose summary is on the
    board."""


@dataclass(slots=True)
class Delivery:
    """A group that a consumer holds at a stage."""

    group_id: str
    entry_id: str
    """Id of the stream entry; a group that is handed back gets a new one."""
    stage: str
    consumer: str
    attempt: int
    """1 for the first delivery of this group at this stage."""
    trace: dict[str, str]
    """Trace context of the span that created the group."""
    enqueued_at: int
    """Time of the offer (or nack) by Redis's clock, in microseconds of Unix time."""
    pointers: dict[str, str] = field(repr=False, compare=False)
    """Pointers to the columns; internal to the board."""
    worked: tuple[int, int] | None = field(default=None, compare=False)
    """Start and end of the work in microseconds of Unix time, stored with the commit (see `relaxd.board.types`)."""


@dataclass(frozen=True)
class Saved:
    """The unfinished work that deliveries of a group have saved at a stage."""

    pointers: str = ""
    """Pointers to the parts; internal to the board."""
    parts: Sequence[Mapping[str, Column]] = ()
    """Columns of each part, in the order of saving."""


@dataclass(frozen=True)
class Admission:
    """The gate's current admission of groups."""

    room: int
    """Number of groups that may be published."""
    limit: str
    """Name of the limit that determines `room`: "closed", "weights", "staleness", "complete", "memory" or "full"."""
    detail: str
    """The limit as a sentence with its numbers."""


@dataclass(frozen=True)
class PromptRetry:
    """A dropped group whose prompt waits to be retried."""

    group_id: str
    retries: int
    """Retries of its prompt so far."""


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
    """A committed step."""

    step: int
    time: float
    """Unix time by Redis's clock."""
    term: int
    """The trainer term that committed the step."""
    plan: dict[str, Any]
    metrics: dict[str, float]

    @property
    def identity(self) -> tuple[int, int, float]:
        """Step, term and time of the commit. If Redis lost a step that was then committed again, the two differ."""
        return self.step, self.term, self.time


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Group counts of the conservation law, read in one transaction."""

    published: int
    open: int
    """Number of open groups: counted, not derived."""
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]
    last_step: int
    consecutive_drops: int
    """Groups that failed since the last committed step."""
    consecutive_filtered: int
    """Groups that the algorithm filtered since the last committed step."""

    def check(self) -> None:
        """Raise AssertionError unless published = open + trained + dropped."""
        if self.published != self.open + self.trained + self.dropped:
            raise AssertionError(
                f"groups were lost or duplicated: published {self.published} is not open {self.open} + trained "
                f"{self.trained} + dropped {self.dropped}"
            )


@dataclass(frozen=True)
class QueueDepth:
    """Number of groups that wait for a stage, and of groups that are held in it."""

    stage: str
    waiting: int
    held: int


@dataclass(frozen=True)
class HeldGroup:
    """A group that a consumer holds at a stage."""

    group_id: str
    holder: str
    """The consumer."""
    enqueued_at: float
    """Unix time at which the group was offered to the stage, by Redis's clock."""
    idle_seconds: float = 0.0
    """Seconds since the lease was last renewed."""
    deliveries: int = 1


@dataclass(frozen=True)
class GroupOutcome:
    """The fate of a closed group: trained, or dropped and why."""

    entry_id: str
    """Id of the entry in the stream of outcomes."""
    record: dict[str, Any]
    """`group`; for a trained group `step`, for a dropped one `reason`, `stage`, `attempt` and `retried`; its facts
    (`NewGroup.facts`, relaxd.board.group_contents); and `trace_id`, if it is traced."""

    @property
    def line(self) -> dict[str, Any]:
        """The entry's line in the run's groups.jsonl."""
        return {**self.record, "entry": self.entry_id}


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """Record of a dropped group."""

    group_id: str
    reason: str
    stage: str
    """The stage that dropped it; empty for a drop by id."""
    attempt: int
    """Deliveries at that stage."""
    time: float
    """Unix time."""
    retried: bool
    """True if the prompt was queued for a retry."""
    columns: dict[str, Column]
    """The prompt's columns, unless they exceed 64 KiB."""
    detail: str = ""
    """The error, for people."""


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
    """Times by stage, for the stages that have committed."""


def microseconds() -> int:
    """Return the current time in microseconds of Unix time."""
    return time.time_ns() // 1000


def parse_times(published: bytes, stages: Mapping[str, bytes]) -> GroupTimes:
    """Parse a group's times: when it was published, and "<enqueued_at> <started_at> <ended>" of each stage."""
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
    """The step is not the last one plus one, or its plan names a group that is not open."""


class LedgerTrimmed(BoardError):
    """The board has trimmed these steps from its ledger; they are in the run's folder. `first`: the ledger's first
    step."""

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
