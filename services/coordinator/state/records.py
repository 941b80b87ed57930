"""Records of runs, replicas and weights in Redis."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """An immutable record: replaced as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Phase(StrEnum):
    """Phase of a run; the names are those of the RunState enum, which also has PAUSED."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """The phase is final."""
        return self in (Phase.STOPPED, Phase.FAILED)


class Outcome(StrEnum):
    """End of a run; names and meanings are those of the RunOutcome enum."""

    COMPLETED = "COMPLETED"
    STOPPED = "STOPPED"
    REPLICAS_FAILED = "REPLICAS_FAILED"
    EVALUATION_FAILED = "EVALUATION_FAILED"
    DATA_FAILED = "DATA_FAILED"


class Evaluation(Record):
    """Result of one evaluation."""

    step: int
    """The evaluated version."""
    metrics: dict[str, float]
    """eval_reward, eval_<part> for each part of the reward, ..."""


class RunRecord(Record):
    """One run."""

    run_id: str
    config_json: str
    """The resolved configuration."""
    folder: str
    """Absolute path of the run's folder."""
    phase: Phase = Phase.PENDING
    outcome: Outcome | None = None
    """None before its end."""
    reason: str = ""
    """Reason for the phase, for users."""
    paused: str | None = None
    """Reason for the pause; None if not paused. Only a pending or running run can be paused."""
    paused_at: datetime | None = None
    """When the last pause began."""
    stop_reason: str = ""
    """Reason given to StopRun; empty if the run was not stopped."""
    request_id: str = ""
    """Id of the StartRun request, if it had one."""
    request_digest: str = ""
    """SHA-256 of what that request asked for."""
    create_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    begin_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    """When it was created, or restored last."""
    end_time: datetime | None = None
    evaluations: tuple[Evaluation, ...] = ()
    forgiven_drops: int = 0
    """Consecutive failed groups when the run was last resumed."""
    forgiven_filtered: int = 0
    """Consecutive filtered groups when the run was last resumed."""
    board_bytes: int = 0
    """Size in Redis at its end."""
    notes: tuple[str, ...] = ()
    """Problems that did not end the run."""
    prompts: int = 0
    """Number of its training prompts; 0: not known, of an earlier release."""
    prompts_digest: str = ""
    """Digest of all of them (`PromptDataset.digest`)."""

    @property
    def reason_shown(self) -> str:
        """Reason for the run's state: that of its pause, or else of its phase."""
        return self.reason if self.paused is None else self.paused


class ReplicaRecord(Record):
    """One registration."""

    registration_json: str
    """The Registration, as JSON."""
    registered_at: float
    """Unix time; distinguishes registrations with the same id."""
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

    def __hash__(self) -> int:  # pydantic's makes a tuple of all fields each time
        return hash(self.replica_id)


class GroupRecord(Record):
    """The weight group that is connected, or was about to be."""

    name: str
    trainer: Member
    engines: tuple[Member, ...]


class WeightsRecord(Record):
    """State of weight synchronisation that survives a restart."""

    last_sync_id: int = 0
    running: bool = False
    """A synchronisation is in progress; after a restart it is aborted."""
    group: GroupRecord | None = None
    announced: Announcement | None = None
    last_sync_seconds: float = 0.0
