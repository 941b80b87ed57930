"""What the coordinator keeps of the health of a run, as models."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import Field

from services.coordinator.state.records import Record

KEPT_EVENTS = 200


class Health(StrEnum):
    """How well a replica or a role is; the names are those of the HealthState enum, which explains them."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    RESTARTING = "RESTARTING"
    REBUILDING = "REBUILDING"
    FAILED = "FAILED"


class ReplicaHealth(Record):
    """One place for a replica, over all the processes that it has had."""

    instance: str
    role: str
    """Name of a Role without its prefix, such as ROLLOUT."""
    replica_id: str
    """Its newest process."""
    address: str = ""
    """Where that is, or was."""
    told_id: str = ""
    """The process that was told to go last."""
    supervised: bool = False
    """Somebody starts it again when it ends."""
    state: Health = Health.HEALTHY
    reason: str = ""
    since: float = 0.0
    """Unix time at which it got into this state, or was told to restart again."""
    down_since: float = 0.0
    """Unix time at which it stopped working last."""
    restarts: tuple[float, ...] = ()
    """Unix times at which this coordinator, or one before, told it to restart; the last ones."""
    tries: int = 0
    """Times in a row that it went, or was not back in time, without having worked in between."""
    seen_working: bool = False
    """Its newest process has got something done."""


class RoleHealth(Record):
    """A role as a whole."""

    role: str
    state: Health = Health.HEALTHY
    reason: str = ""
    since: float = 0.0
    """Unix time at which it got into this state."""
    rebuilds: int = 0
    """Without a step committed since the first of them."""
    rebuilt_at_step: int = 0
    """The last step when the last rebuild began."""
    pause: str = ""
    """The reason with which the run was paused for a rebuild: whoever finds it paused so may end the pause."""


class Event(Record):
    """Something that was done about the health of a run, or that happened to it."""

    number: int
    time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    role: str
    instance: str
    """Empty: the role as a whole."""
    state: Health
    text: str


class HealthRecord(Record):
    """Everything that the health manager must remember over a restart of the coordinator."""

    replicas: dict[str, ReplicaHealth] = Field(default_factory=dict)
    """By instance."""
    roles: dict[str, RoleHealth] = Field(default_factory=dict)
    """By role."""
    events: tuple[Event, ...] = ()
    """The last ones, oldest first."""

    def waiting_anew(self, now: float) -> "HealthRecord":
        """The same, but what is awaited has all of its time from `now` on: nobody was there to see it come."""
        replicas = {
            key: one.model_copy(update={"since": now}) if one.state == Health.RESTARTING else one
            for key, one in self.replicas.items()
        }
        roles = {
            key: one.model_copy(update={"since": now}) if one.state == Health.REBUILDING else one
            for key, one in self.roles.items()
        }
        return self.model_copy(update={"replicas": replicas, "roles": roles})
