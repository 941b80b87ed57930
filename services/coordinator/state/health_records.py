"""Records of a run's health in Redis."""

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from services.coordinator.state.records import Record

KEPT_EVENTS = 200


class Health(StrEnum):
    """State of a replica or a role; names and meanings are those of the HealthState enum."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    RESTARTING = "RESTARTING"
    REBUILDING = "REBUILDING"
    FAILED = "FAILED"


class ReplicaHealth(Record):
    """One instance of a replica, across its restarts."""

    instance: str
    role: str
    replica_id: str
    """Its newest process."""
    address: str = ""
    """Address of the newest process."""
    stopped_id: str = ""
    """Id of the process that was last asked to end."""
    supervised: bool = False
    """A supervisor restarts it when it ends."""
    state: Health = Health.HEALTHY
    reason: str = ""
    since: float = 0.0
    """Unix time at which it entered this state, or was last restarted."""
    down_since: float = 0.0
    """Unix time at which it last stopped working."""
    restarts: tuple[float, ...] = ()
    """Unix times of the last restarts, by this or an earlier coordinator."""
    tries: int = 0
    """Consecutive losses and missed returns without work in between."""
    counted_id: str = ""
    """Id of the last process whose end is among `tries`."""
    failure: str = ""
    """The last error that one of its processes reported, since one worked."""
    seen_working: bool = False
    """Its newest process has made progress."""
    refused: bool = False
    """It failed because its start was refused: the settings or the model are wrong."""


class RoleHealth(Record):
    """Health of a role as a whole."""

    role: str
    state: Health = Health.HEALTHY
    reason: str = ""
    since: float = 0.0
    """Unix time at which it entered this state."""
    rebuilds: int = 0
    """Rebuilds since the last committed step."""
    rebuilt_at_step: int = 0
    """Last committed step at the start of the last rebuild."""
    pause: str = ""
    """Reason of the run's pause for a rebuild: any coordinator that finds the run paused for it may resume the run."""


class Event(Record):
    """A change of a run's health, or an action on it."""

    number: int
    time: datetime
    role: str
    instance: str
    """Empty for the role as a whole."""
    state: Health
    text: str


class HealthRecord(Record):
    """State of the health manager that survives a restart of the coordinator."""

    replicas: dict[str, ReplicaHealth] = Field(default_factory=dict)
    """By instance."""
    roles: dict[str, RoleHealth] = Field(default_factory=dict)
    """By role."""
    events: tuple[Event, ...] = ()
    """Latest events, oldest first."""

    @property
    def given_up(self) -> Iterator[str]:
        """The instances that failed."""
        return (instance for instance, one in self.replicas.items() if one.state == Health.FAILED)

    def with_reset_timers(self, now: float) -> "HealthRecord":
        """Return a copy in which all waits start at `now`, after a time without a coordinator or without Redis.

        Tries begin anew, too: a process may have ended because of that time. Times after `now` are an earlier
        coordinator's, before the clock was set back: restarts there no longer count, and waits from there begin now.
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
