"""What the coordinator keeps in Redis, as models."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A record: replaced as a whole, never changed in place."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Phase(StrEnum):
    """How far a run is; the names are those of the RunState enum, which has PAUSED besides."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """Whether nothing more happens."""
        return self in (Phase.STOPPED, Phase.FAILED)


class Evaluation(Record):
    """Result of one evaluation."""

    step: int
    """The version that was asked."""
    metrics: dict[str, float]
    """eval_accuracy, eval_format, ..."""


class RunRecord(Record):
    """One run."""

    run_id: str
    config_json: str
    """The resolved configuration."""
    folder: str
    """Absolute path of the run's own folder."""
    phase: Phase = Phase.PENDING
    reason: str = ""
    """Why it is in this phase; for people."""
    paused: str | None = None
    """Why it is paused; None while it isn't. Only a pending or running run can be."""
    stop_reason: str = ""
    """Why a person ended it early; empty otherwise."""
    create_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    end_time: datetime | None = None
    evaluations: tuple[Evaluation, ...] = ()
    forgiven_drops: int = 0
    """Groups that failed in a row that a person has seen and resumed from."""
    forgiven_filtered: int = 0
    """Groups that were filtered in a row that a person has seen and resumed from."""
    board_bytes: int = 0
    """What it took in Redis when it ended."""
    notes: tuple[str, ...] = ()
    """What went wrong without ending the run."""


class ReplicaRecord(Record):
    """One registration."""

    registration_json: str
    """The RegisterRequest."""
    registered_at: float
    """Unix time; tells this registration from an earlier one under the same id."""
    draining: bool = False
    drain_until: float | None = None
    """Unix time until which it may drain; None: as long as its own grace period lasts."""


class Announcement(Record):
    """The newest version that a trainer announced."""

    run_id: str
    replica_id: str
    """The trainer."""
    term: int
    version: int


class Member(Record):
    """A replica as a member of a weight group."""

    replica_id: str
    registered_at: float
    address: str
    ranks: int = 1


class GroupRecord(Record):
    """The weight group that is, or was to be, connected."""

    name: str
    trainer: Member
    engines: tuple[Member, ...]


class WeightsRecord(Record):
    """Everything that weight synchronisation must remember over a restart."""

    last_sync_id: int = 0
    running: bool = False
    """A synchronisation has begun and not ended: after a restart it is aborted."""
    group: GroupRecord | None = None
    announced: Announcement | None = None
    last_sync_seconds: float = 0.0
