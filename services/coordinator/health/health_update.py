"""Changing the record of a run's health: everything is collected, saved at once, and only then acted upon."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from relaxd.config import HealthConfig
from services.coordinator.state.health_records import (
    KEPT_EVENTS,
    Event,
    Health,
    HealthRecord,
    ReplicaHealth,
    RoleHealth,
)

DOWN = (Health.RESTARTING, Health.FAILED)


class Way(Enum):
    """How a replica is restarted."""

    TELL = auto()
    """It is told to end; its launcher kills it where it doesn't answer."""
    PROBE = auto()
    """It is gone, it seems: its launcher kills it only if it is there and doesn't answer."""
    INSIST = auto()
    """It should have come back: its launcher starts it, and kills whatever runs in its place."""


@dataclass(frozen=True)
class Ask:
    """A replica that has to be restarted."""

    instance: str
    role: str
    replica_id: str
    address: str
    reason: str
    way: Way


class HealthUpdate:
    """A record with changes."""

    def __init__(self, record: HealthRecord) -> None:
        self._before = record
        self.replicas = dict(record.replicas)
        self.roles = dict(record.roles)
        self.events = list(record.events)
        self.asks: list[Ask] = []
        """What to do once the record is saved."""
        self.gone: list[str] = []
        """Ids of processes that are gone: what they hold is to be freed."""

    @property
    def new_events(self) -> Sequence[Event]:
        """Those that the record did not have."""
        last = self._before.events[-1].number if self._before.events else 0
        return [event for event in self.events if event.number > last]

    def result(self) -> HealthRecord:
        """The record with the changes."""
        return HealthRecord(replicas=self.replicas, roles=self.roles, events=tuple(self.events[-KEPT_EVENTS:]))

    def set_replica(self, one: ReplicaHealth, **changes: Any) -> ReplicaHealth:
        """Change a replica's part."""
        if changes.get("state", one.state) != one.state:
            changes.setdefault("since", time.time())
            if changes["state"] in DOWN and one.state not in DOWN:
                changes["down_since"] = time.time()
        self.replicas[one.instance] = changed = one.model_copy(update=changes)
        return changed

    def set_role(self, role: RoleHealth, **changes: Any) -> RoleHealth:
        """Change a role's part."""
        if changes.get("state", role.state) != role.state:
            changes.setdefault("since", time.time())
        self.roles[role.role] = changed = role.model_copy(update=changes)
        return changed

    def tell(self, role: str, instance: str, state: Health, text: str) -> None:
        """Add an event."""
        number = (self.events[-1].number if self.events else 0) + 1
        self.events.append(Event(number=number, role=role, instance=instance, state=state, text=text))

    def restart(self, one: ReplicaHealth, reason: str, way: Way = Way.TELL) -> None:
        """Have a replica restarted."""
        self.set_replica(
            one,
            state=Health.RESTARTING,
            since=time.time(),
            reason=reason,
            told_id="" if way == Way.PROBE else one.replica_id,
            restarts=one.restarts if way == Way.PROBE else (*one.restarts, time.time()),
            tries=1 if one.seen_working else one.tries + 1,
            seen_working=False,
        )
        does = "waiting for the next process of" if way == Way.PROBE else "restarting"
        self.tell(one.role, one.instance, Health.RESTARTING, f"{does} {one.replica_id}: {reason}")
        self.asks.append(Ask(one.instance, one.role, one.replica_id, one.address, reason, way))


def recent(restarts: Sequence[float], config: HealthConfig) -> tuple[float, ...]:
    """The restarts within the window."""
    return tuple(at for at in restarts if at > time.time() - config.restart_window_seconds)


def next_restart(restarts: Sequence[float], config: HealthConfig) -> float:
    """The Unix time from which on a replica may be restarted, given when it was: exponential back-off, and never more
    than max_restarts within restart_window_seconds."""
    latest = recent(restarts, config)
    if not latest:
        return 0.0
    if len(latest) >= config.max_restarts:
        return latest[-config.max_restarts] + config.restart_window_seconds
    return latest[-1] + config.first_backoff_seconds * 2 ** (len(latest) - 1)
