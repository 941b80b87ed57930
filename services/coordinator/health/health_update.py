"""A draft of a run's health record: changes are collected, saved together, and only then acted upon."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from relaxd.config import HealthConfig
from relaxd.waiting import Backoff
from services.coordinator.state.records import (
    KEPT_EVENTS,
    Event,
    Health,
    HealthRecord,
    ReplicaHealth,
    RoleHealth,
)

DOWN = (Health.RESTARTING, Health.FAILED)


class RestartMode(Enum):
    """The way in which a replica is restarted."""

    REQUEST = auto()
    """Ask the process to end; if it doesn't answer, the launcher kills it."""
    PROBE = auto()
    """The process seems to be gone: the launcher kills it only if it runs and doesn't answer."""
    FORCE = auto()
    """The process did not come back: the launcher starts it, and kills any process in its place."""


@dataclass(frozen=True)
class RestartOrder:
    """A replica to restart."""

    instance: str
    role: str
    replica_id: str
    address: str
    reason: str
    mode: RestartMode


class HealthUpdate:
    """A health record with pending changes, all from one moment."""

    def __init__(self, record: HealthRecord, now: float) -> None:
        """`now`: Unix time of the changes and of all decisions about them."""
        self._before = record
        self.now = now
        self.replicas = dict(record.replicas)
        self.roles = dict(record.roles)
        self.events = list(record.events)
        self.restarts: list[RestartOrder] = []
        """Restarts to execute once the record is saved."""
        self.lost_ids: list[str] = []
        """Ids of lost processes whose groups are to be reclaimed."""

    @property
    def new_events(self) -> Sequence[Event]:
        """Events added by this update."""
        last = self._before.events[-1].number if self._before.events else 0
        return [event for event in self.events if event.number > last]

    def result(self) -> HealthRecord:
        """Return the changed record."""
        return HealthRecord(replicas=self.replicas, roles=self.roles, events=tuple(self.events[-KEPT_EVENTS:]))

    def set_replica(self, one: ReplicaHealth, **changes: Any) -> ReplicaHealth:
        """Update a replica."""
        if changes.get("state", one.state) != one.state:
            changes.setdefault("since", self.now)
            if changes["state"] in DOWN and one.state not in DOWN:
                changes["down_since"] = self.now
        self.replicas[one.instance] = changed = one.model_copy(update=changes)
        return changed

    def set_role(self, role: RoleHealth, **changes: Any) -> RoleHealth:
        """Update a role."""
        if changes.get("state", role.state) != role.state:
            changes.setdefault("since", self.now)
        self.roles[role.role] = changed = role.model_copy(update=changes)
        return changed

    def add_event(self, role: str, instance: str, state: Health, text: str) -> None:
        """Add an event."""
        number = (self.events[-1].number if self.events else 0) + 1
        at = datetime.fromtimestamp(self.now, UTC)
        self.events.append(Event(number=number, time=at, role=role, instance=instance, state=state, text=text))

    def restart(self, one: ReplicaHealth, reason: str, mode: RestartMode = RestartMode.REQUEST) -> None:
        """Order a replica's restart."""
        self.set_replica(
            one,
            state=Health.RESTARTING,
            since=self.now,
            reason=reason,
            stopped_id="" if mode == RestartMode.PROBE else one.replica_id,
            restarts=one.restarts if mode == RestartMode.PROBE else (*one.restarts, self.now),
            tries=1 if one.seen_working else one.tries + 1,
            counted_id=one.replica_id,
            seen_working=False,
            refused=False,
        )
        action = "waiting for the next process of" if mode == RestartMode.PROBE else "restarting"
        self.add_event(one.role, one.instance, Health.RESTARTING, f"{action} {one.replica_id}: {reason}")
        self.restarts.append(RestartOrder(one.instance, one.role, one.replica_id, one.address, reason, mode))


def recent(restarts: Sequence[float], config: HealthConfig, now: float) -> tuple[float, ...]:
    """Return the restarts within the window that ends at `now`."""
    return tuple(at for at in restarts if at > now - config.restart_window_seconds)


def next_restart(restarts: Sequence[float], config: HealthConfig, now: float) -> float:
    """Return the Unix time of the next allowed restart.

    Back-off is exponential, with at most max_restarts within restart_window_seconds.
    """
    latest = recent(restarts, config, now)
    if not latest:
        return 0.0
    if len(latest) >= config.max_restarts:
        return latest[-config.max_restarts] + config.restart_window_seconds
    return latest[-1] + Backoff(config.first_backoff_seconds).pause(len(latest))
