"""Records in Redis: runs, replicas, weights, health, and scale requests."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """An immutable record. To change one, it is replaced as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Phase(StrEnum):
    """Phase of a run. The members' names are those of the RunState enum, which also has PAUSED."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """True if the phase is final."""
        return self in (Phase.STOPPED, Phase.FAILED)


class Outcome(StrEnum):
    """Outcome of a run; names and meanings are those of the RunOutcome enum."""

    COMPLETED = "COMPLETED"
    STOPPED = "STOPPED"
    REPLICAS_FAILED = "REPLICAS_FAILED"
    EVALUATION_FAILED = "EVALUATION_FAILED"
    DATA_FAILED = "DATA_FAILED"
    FOLDER_HELD = "FOLDER_HELD"


class Evaluation(Record):
    """Result of one evaluation of a run."""

    step: int
    """The evaluated version."""
    metrics: dict[str, float]
    """Metrics of the evaluation: eval_reward, eval_<part> for each part of the reward, and others."""


@dataclass(frozen=True)
class RoleFailure:
    """Failure of a role without a working replica. It ends the run."""

    role: str
    instance: str
    """Replica whose error is the reason; empty if the role failed as a whole."""
    reason: str

    def __str__(self) -> str:
        return self.reason


class RunRecord(Record):
    """Record of one run."""

    run_id: str
    config_json: str
    """The run's resolved configuration, as JSON."""
    folder: str
    """Absolute path of the run's folder."""
    phase: Phase = Phase.PENDING
    outcome: Outcome | None = None
    """Outcome of the run; None before its end."""
    reason: str = ""
    """Reason for the run's phase, for users."""
    failed_role: str = ""
    """Role whose failure ended the run; empty if the run ended for another reason."""
    failed_instance: str = ""
    """Replica of the failed role whose error is the reason; empty if the role failed as a whole."""
    paused: str | None = None
    """Reason for the run's pause; None if the run is not paused. Only a pending or running run can be paused."""
    paused_at: datetime | None = None
    """Time at which the run was last paused; None if it never was."""
    autoscale: str = ""
    """Autoscaler mode that was set during the run; empty if the configuration's mode applies."""
    stop_reason: str = ""
    """Reason given to StopRun; empty if the run was not stopped."""
    request_id: str = ""
    """Id of the StartRun request, if it had one."""
    request_digest: str = ""
    """SHA-256 of the StartRun request's content."""
    create_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    begin_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    """Time at which the run was created or last restored."""
    end_time: datetime | None = None
    evaluations: tuple[Evaluation, ...] = ()
    evaluating: int = 0
    """Version under evaluation whose checkpoint may become the best (relaxd.best_checkpoint); 0 if there is none."""
    patience_from: int = 0
    """Step after which evaluations without an improvement count for run.stop_early."""
    forgiven_drops: int = 0
    """Number of consecutive failed groups when the run was last resumed; these don't count towards a pause."""
    forgiven_filtered: int = 0
    """Number of consecutive filtered groups when the run was last resumed; these don't count towards a pause."""
    board_bytes: int = 0
    """Size of the run in Redis at its end, in bytes."""
    notes: tuple[str, ...] = ()
    """Sentences for users about problems that did not end the run."""
    prompts: int = 0
    """Number of the run's training prompts; 0 if unknown, because an earlier release wrote the record."""
    prompts_digest: str = ""
    """Digest of the training prompts (`PromptDataset.digest`)."""

    @property
    def reason_shown(self) -> str:
        """Reason for the pause if the run is paused, otherwise the reason for its phase."""
        return self.reason if self.paused is None else self.paused


class ReplicaRecord(Record):
    """Record of one replica's registration."""

    registration_json: str
    """The replica's Registration message, as JSON."""
    registered_at: float
    """Unix time of the registration; distinguishes registrations with the same replica id."""
    draining: bool = False
    drain_until: float | None = None
    """Unix time until which the replica may drain; None if the replica's grace period applies."""


class Announcement(Record):
    """The newest version that a trainer announced."""

    run_id: str
    replica_id: str
    """Replica id of the trainer."""
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
    """State of weight synchronisation, kept in Redis so that it survives a restart of the coordinator."""

    last_sync_id: int = 0
    running: bool = False
    """True while a synchronisation is in progress. A restarted coordinator aborts it."""
    group: GroupRecord | None = None
    announced: Announcement | None = None
    last_sync_seconds: float = 0.0


KEPT_EVENTS = 200


class Health(StrEnum):
    """State of a replica or a role; names and meanings are those of the HealthState enum."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    RESTARTING = "RESTARTING"
    REBUILDING = "REBUILDING"
    FAILED = "FAILED"


class ReplicaHealth(Record):
    """Health of one replica instance, across restarts of its process."""

    instance: str
    role: str
    replica_id: str
    """Id of the replica's newest process."""
    address: str = ""
    """Address of the replica's newest process."""
    stopped_id: str = ""
    """Id of the replica's process that was last asked to end."""
    supervised: bool = False
    """True if a supervisor restarts the process when it ends."""
    state: Health = Health.HEALTHY
    reason: str = ""
    since: float = 0.0
    """Unix time at which this health state began, or of the last restart."""
    down_since: float = 0.0
    """Unix time at which the replica last became RESTARTING or FAILED."""
    restarts: tuple[float, ...] = ()
    """Unix times of the last restarts, by this or an earlier coordinator."""
    tries: int = 0
    """Number of consecutive times that a process was lost or did not come back, without a finished group in between."""
    counted_id: str = ""
    """Id of the last process whose end `tries` counts."""
    failure: str = ""
    """Last error that the replica's processes reported since one of them last worked."""
    seen_working: bool = False
    """True if the replica's newest process has finished a group."""
    refused: bool = False
    """True if the replica refused to start, because the settings or the model are wrong."""


class RoleHealth(Record):
    """Health of a role as a whole."""

    role: str
    state: Health = Health.HEALTHY
    reason: str = ""
    since: float = 0.0
    """Unix time at which the role's health state began."""
    rebuilds: int = 0
    """Number of the role's rebuilds (restarts of all its replicas) since the last committed step."""
    rebuilt_at_step: int = 0
    """Number of the run's last committed step when the role's last rebuild began."""
    pause: str = ""
    """Reason of the run's pause for this role's rebuild. A coordinator ends the pause only if the run's reason is the
    same."""


class Event(Record):
    """An event in a run's health log: a changed state, or an action such as a restart."""

    number: int
    time: datetime
    role: str
    instance: str
    """Name of the replica instance; empty if the event concerns the role as a whole."""
    state: Health
    text: str


class HealthRecord(Record):
    """State of the health manager that survives a restart of the coordinator."""

    replicas: dict[str, ReplicaHealth] = Field(default_factory=dict)
    """Health of each replica, by name of the instance."""
    roles: dict[str, RoleHealth] = Field(default_factory=dict)
    """Health of each role, by role name."""
    events: tuple[Event, ...] = ()
    """Latest health events, oldest first."""

    @property
    def given_up(self) -> Iterator[str]:
        """Names of the replica instances whose health is FAILED."""
        return (instance for instance, one in self.replicas.items() if one.state == Health.FAILED)

    def with_reset_timers(self, now: float) -> "HealthRecord":
        """Return a copy of the health record with all timers restarted at `now`, after a time without a coordinator or
        without Redis.

        Tries are reset, too, because a process may have ended during that time. Times after `now` come from an earlier
        coordinator, before the clock was set back: restarts at such times no longer count, and waits since such times
        begin now.
        """
        replicas = {
            key: one.model_copy(
                update={
                    "tries": one.tries if one.state == Health.FAILED else 0,
                    "since": now if one.state == Health.RESTARTING else min(one.since, now),
                    "down_since": min(one.down_since, now),
                    "restarts": tuple(at for at in one.restarts if at <= now),
                }
            )
            for key, one in self.replicas.items()
        }
        roles = {
            key: one.model_copy(update={"since": now if one.state == Health.REBUILDING else min(one.since, now)})
            for key, one in self.roles.items()
        }
        return self.model_copy(update={"replicas": replicas, "roles": roles})


class Direction(StrEnum):
    """Direction of a scale request: OUT adds replicas, IN removes them. Names are those of the ScaleDirection enum."""

    OUT = "OUT"
    IN = "IN"


class ScaleState(StrEnum):
    """State of a scale request or of one of its replicas; names and meanings are those of the ScaleState enum."""

    PENDING = "PENDING"
    CREATING = "CREATING"
    SYNCING = "SYNCING"
    DRAINING = "DRAINING"
    REMOVING = "REMOVING"
    ACTIVE = "ACTIVE"
    DONE = "DONE"
    PARTIAL = "PARTIAL"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return self not in UNDER_WAY

    @property
    def can_go_back(self) -> bool:
        """True if a cancelled scale request rolls back a replica in this state."""
        return self in UNDER_WAY and self != ScaleState.REMOVING


UNDER_WAY = (
    *(ScaleState.PENDING, ScaleState.CREATING, ScaleState.SYNCING),
    *(ScaleState.DRAINING, ScaleState.REMOVING),
)
"""States of scale requests and their replicas that are in progress, the least advanced first."""


TIMEOUT_SECONDS, DRAIN_SECONDS = 600.0, 30.0
"""Default seconds until new replicas must be active, and default seconds of a drain."""
ROLLED_BACK = "rolled back, because another replica failed"


class ScaleSpec(Record):
    """Parameters of a scale request."""

    direction: Direction
    role: str
    replicas: int = 0
    """Wanted number of replicas; 0 if `addresses`, `sglang_urls` or `replica_ids` name the replicas."""
    addresses: tuple[str, ...] = ()
    sglang_urls: tuple[str, ...] = ()
    replica_ids: tuple[str, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    seconds: float
    """Seconds until all new replicas must be active (OUT), or all removed replicas must be drained (IN)."""
    rollback_all: bool = False
    """True if all new replicas are removed when one of them fails. Only for direction OUT."""


class ScaledReplica(Record):
    """One replica that a scale request adds or removes."""

    launch_id: str
    state: ScaleState = ScaleState.PENDING
    outcome: ScaleState | None = None
    """Final state that the replica gets once it is removed."""
    replica_id: str = ""
    address: str = ""
    """Address of the replica; empty until it is known."""
    gpu_uuids: tuple[str, ...] = ()
    sglang_url: str = ""
    detail: str = ""


class ScaleRecord(Record):
    """Record of one scale request."""

    request_id: str
    spec: ScaleSpec
    scaled: tuple[ScaledReplica, ...] = ()
    cancelled: bool = False
    rolled_back: bool = False
    """True if all replicas are removed because one failed and `rollback_all` is set."""
    reason: str = ""
    create_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    update_time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    deadline: datetime

    @property
    def state(self) -> ScaleState:
        """State of the least advanced replica; once all replicas have ended, the result of the request."""
        states = {replica.state for replica in self.scaled}
        if under_way := [state for state in UNDER_WAY if state in states]:
            return under_way[0]
        good = ScaleState.ACTIVE if self.spec.direction == Direction.OUT else ScaleState.DONE
        if states <= {good}:
            return good
        if self.rolled_back:
            return ScaleState.FAILED
        if ScaleState.CANCELLED in states:
            return ScaleState.CANCELLED
        return ScaleState.PARTIAL if good in states else ScaleState.FAILED

    @property
    def going_back(self) -> bool:
        """True if the scale request was cancelled or rolled back."""
        return self.cancelled or self.rolled_back

    def after_failures(self) -> "ScaleRecord":
        """Return the request, with all replicas rolled back if `rollback_all` is set and one of them has failed."""
        failed = any(ScaleState.FAILED in (replica.state, replica.outcome) for replica in self.scaled)
        if not (self.spec.rollback_all and failed) or self.going_back:
            return self
        back = {"state": ScaleState.DRAINING, "outcome": ScaleState.CANCELLED, "detail": ROLLED_BACK}
        scaled = tuple(
            replica.model_copy(update=back) if replica.state == ScaleState.ACTIVE else replica
            for replica in self.scaled
        )
        deadline = datetime.now(UTC) + timedelta(seconds=DRAIN_SECONDS)
        return self.model_copy(update={"rolled_back": True, "scaled": scaled, "deadline": deadline})
