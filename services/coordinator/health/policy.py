"""The health policy: decisions on single replicas, on whole roles and on a run, from its records. Nothing here executes
a decision.

Decisions are collected in a draft of the health record (HealthUpdate), saved together, and only then acted upon.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from relaxd import telemetry
from relaxd.config import HealthConfig, RunConfig
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_FAILED,
    REPLICA_STATE_QUARANTINED,
    REPLICA_STATE_READY,
)
from relaxd.waiting import Backoff
from services.coordinator.fleet.registry import Replica
from services.coordinator.health.detection import HealthIssue, HealthSignals
from services.coordinator.state.records import (
    KEPT_EVENTS,
    Event,
    Health,
    HealthRecord,
    ReplicaHealth,
    RoleFailure,
    RoleHealth,
)

DOWN = (Health.RESTARTING, Health.FAILED)


class RestartMode(Enum):
    """Ways to restart a replica."""

    REQUEST = auto()
    """Ask the process to end; if it doesn't answer, the launcher kills it."""
    PROBE = auto()
    """The process seems to be gone: the launcher kills it only if it runs and doesn't answer."""
    FORCE = auto()
    """The process did not come back: the launcher starts it, and kills any process in its place."""


@dataclass(frozen=True)
class RestartOrder:
    """Order to restart a replica in a given way."""

    instance: str
    role: str
    replica_id: str
    address: str
    reason: str
    mode: RestartMode


class HealthUpdate:
    """Draft of a health record: changes to a record that are not yet saved, all from one moment."""

    def __init__(self, record: HealthRecord, now: float) -> None:
        """Begin a draft without changes. `now` is the Unix time of all changes and decisions."""
        self._before = record
        self.now = now
        self.replicas = dict(record.replicas)
        self.roles = dict(record.roles)
        self.events = list(record.events)
        self.restarts: list[RestartOrder] = []
        """Orders of restarts to execute once the record is saved."""
        self.lost_ids: list[str] = []
        """Ids of lost processes whose groups are to be reclaimed."""

    @property
    def new_events(self) -> Sequence[Event]:
        """Health events that this draft adds."""
        last = self._before.events[-1].number if self._before.events else 0
        return [event for event in self.events if event.number > last]

    def result(self) -> HealthRecord:
        """Return the new health record. It has only the newest KEPT_EVENTS events."""
        return HealthRecord(replicas=self.replicas, roles=self.roles, events=tuple(self.events[-KEPT_EVENTS:]))

    def set_replica(self, one: ReplicaHealth, **changes: Any) -> ReplicaHealth:
        """Change fields of a replica's health. A change of its state also sets the time at which the state began."""
        if changes.get("state", one.state) != one.state:
            changes.setdefault("since", self.now)
            if changes["state"] in DOWN and one.state not in DOWN:
                changes["down_since"] = self.now
        self.replicas[one.instance] = changed = one.model_copy(update=changes)
        return changed

    def set_role(self, role: RoleHealth, **changes: Any) -> RoleHealth:
        """Change fields of a role's health. A change of its state also sets the time at which the state began."""
        if changes.get("state", role.state) != role.state:
            changes.setdefault("since", self.now)
        self.roles[role.role] = changed = role.model_copy(update=changes)
        return changed

    def add_event(self, role: str, instance: str, state: Health, text: str) -> None:
        """Add a health event about a role or an instance to the draft."""
        number = (self.events[-1].number if self.events else 0) + 1
        at = datetime.fromtimestamp(self.now, UTC)
        self.events.append(Event(number=number, time=at, role=role, instance=instance, state=state, text=text))

    def restart(self, one: ReplicaHealth, reason: str, mode: RestartMode = RestartMode.REQUEST) -> None:
        """Set a replica's state to restarting, and add an order to restart it."""
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
    """Return the Unix times of restarts that are less than restart_window_seconds before `now`."""
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


logger = logging.getLogger(__name__)

IGNORED_RESTART_SECONDS = 10.0
"""Seconds after a restart request in which the process should end.

A process still ready afterwards counts as healthy.
"""


@dataclass(frozen=True)
class RoleSigns:
    """State of the run from which the health of whole roles is judged."""

    missing: Collection[str]
    """Names of the roles that have no working replica."""
    last_step: int
    """Number of the last committed step."""


class HealthPolicy:
    """Decides on restarts of one run's replicas, and on rebuilds of whole roles."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        signs: HealthSignals,
        *,
        roles: Sequence[str],
        restart_failures: Mapping[str, str],
        idle_reason: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a policy for the roles that the run needs. `restart_failures` has the error of each instance's last
        restart. `idle_reason` is Fleet.idle_reason, and `clock` is the clock of `signs`."""
        self._run_id = run_id
        self._config = config.health
        self._signs = signs
        self._needed = roles
        self._failures = restart_failures
        self._idle_reason = idle_reason
        self._roles = RoleReconciler(config.health, clock)
        self._leaving: dict[str, str] = {}
        """Ids of draining replicas, whose end is expected, by instance."""

    @property
    def failure(self) -> RoleFailure | None:
        """Failure of a role because of which the run can't continue; None if there is none."""
        return self._roles.failure

    def reset_timers(self) -> None:
        """Restart all timers, except those stored in the health record (HealthRecord.with_reset_timers)."""
        self._signs.reset_timers()
        self._roles.reset_timers()

    def update(self, draft: HealthUpdate, registered: Iterable[Replica], roles: RoleSigns | None) -> None:
        """Add decisions about the registered replicas and about roles to the draft. `roles` is None until the run has
        started."""
        needed = (one for one in registered if one.registration.role in self._needed)
        live = {one.instance: one for one in sorted(needed, key=lambda one: one.registered_at)}  # the newest of each
        self._update_replicas(draft, live)
        if roles is None:
            return
        for role in self._needed:
            of_role = {instance: replica for instance, replica in live.items() if replica.registration.role == role}
            self._roles.update(draft, role, of_role, roles)

    def _update_replicas(self, draft: HealthUpdate, live: Mapping[str, Replica]) -> None:
        for instance, replica in live.items():
            one = draft.replicas.get(instance)
            if replica.draining or replica.status.state == REPLICA_STATE_DRAINING:
                if one is None or one.state not in DOWN:
                    self._leaving[instance] = replica.replica_id
                    draft.replicas.pop(instance, None)
                continue
            left = self._leaving.pop(instance, replica.replica_id)
            if left != replica.replica_id:
                draft.lost_ids.append(left)
            one = one or self._add(draft, replica)
            if one.replica_id != replica.replica_id:
                one = self._replace(draft, one, replica)
            self._check(draft, one, replica)
        for instance in [instance for instance in self._leaving if instance not in live]:
            draft.lost_ids.append(self._leaving.pop(instance))
        for instance in [instance for instance in draft.replicas if instance not in live]:
            self._on_lost(draft, draft.replicas[instance])

    def _add(self, draft: HealthUpdate, replica: Replica) -> ReplicaHealth:
        registration = replica.registration
        one = ReplicaHealth(
            instance=replica.instance,
            role=registration.role,
            replica_id=replica.replica_id,
            address=registration.address,
            supervised=bool(registration.instance),
            since=draft.now,
        )
        return draft.set_replica(one)

    def _replace(self, draft: HealthUpdate, one: ReplicaHealth, replica: Replica) -> ReplicaHealth:
        """Record that a new process of a replica has replaced the known process."""
        draft.lost_ids.append(one.replica_id)
        changes: dict[str, Any] = {"replica_id": replica.replica_id, "address": replica.registration.address}
        changes |= {"seen_working": False, "refused": False}
        if one.counted_id == one.replica_id:  # its end was asked for, or noticed before
            return draft.set_replica(one, **changes)
        text = f"{one.replica_id} died, and {replica.replica_id} replaced it"
        changes["counted_id"] = one.replica_id
        if self._no_try_left(one):
            return draft.set_replica(self._fail(draft, one, text), **changes)
        text += f"; its last error: {one.failure}" if one.failure else ""
        draft.add_event(one.role, one.instance, Health.RESTARTING, text)
        changes["tries"] = 1 if one.seen_working else one.tries + 1
        return draft.set_replica(one, **changes, state=Health.RESTARTING, since=draft.now, reason=text)

    def _check(self, draft: HealthUpdate, one: ReplicaHealth, replica: Replica) -> None:
        """Set a registered replica's health from its status and issues. Restart it or give it up if necessary."""
        issue = self._signs.issue(replica)
        if replica.status.state == REPLICA_STATE_FAILED and replica.status.detail != one.failure:
            one = draft.set_replica(one, failure=replica.status.detail)
        if one.state in DOWN and replica.replica_id == one.stopped_id:
            ready = replica.status.state == REPLICA_STATE_READY and issue is None
            if ready and draft.now - one.since > IGNORED_RESTART_SECONDS:
                self._record_recovery(draft, one, f"{one.replica_id} works again without a restart")
            else:
                self._await_return(draft, one)
        elif issue is not None and issue.final:
            self._fail(draft, one, issue.text, refused=True)
        elif issue is not None and issue.due:
            self._restart(draft, one, issue)
        elif one.state in DOWN:
            # A failed replica may have been ready before each crash: only finished groups show that it works.
            well = one.state != Health.FAILED or replica.status.done_groups > 0
            if well and replica.status.state in (REPLICA_STATE_READY, REPLICA_STATE_QUARANTINED):
                self._record_recovery(draft, one, f"{one.replica_id} works after {draft.now - one.down_since:.1f} s")
            elif one.state == Health.RESTARTING and self._idle_reason(replica.replica_id):
                self._record_recovery(draft, one, f"{one.replica_id} stands by")
        else:
            changes: dict[str, Any] = {"state": Health.HEALTHY, "reason": ""}
            if issue is not None:
                same = _without_digits(issue.text) == _without_digits(one.reason)
                changes = {"state": Health.SUSPECT, "reason": one.reason if same else issue.text}
            if replica.status.done_groups > 0 and not one.seen_working:
                changes |= {"seen_working": True, "tries": 0, "failure": ""}
            if any(getattr(one, name) != value for name, value in changes.items()):
                draft.set_replica(one, **changes)

    def _record_recovery(self, draft: HealthUpdate, one: ReplicaHealth, text: str) -> None:
        draft.add_event(one.role, one.instance, Health.HEALTHY, text)
        labels = {"relaxd.run_id": self._run_id, "relaxd.role": one.role}
        telemetry.record("health.recovery_seconds", draft.now - one.down_since, labels)
        draft.set_replica(one, state=Health.HEALTHY, reason="", refused=False, stopped_id="", counted_id="")

    def _restart(self, draft: HealthUpdate, one: ReplicaHealth, issue: HealthIssue) -> None:
        """Restart a registered replica if supervision, back-off and the limit of attempts allow it."""
        allowed_at = next_restart(one.restarts, self._config, draft.now)
        reason = issue.text
        if not one.supervised:
            reason += "; no supervisor would start it again (RELAXD_INSTANCE is not set): restart it by hand"
        elif self._no_try_left(one) and not self._may_retry(draft, one):
            self._fail(draft, one, issue.text)
            return
        elif draft.now < allowed_at:
            reason += f"; restarted {len(one.restarts)} times already, next in {allowed_at - draft.now:.0f} s"
        else:
            draft.restart(one, issue.text)
            return
        state = one.state if one.state in DOWN else Health.SUSPECT
        if state != one.state or _without_digits(reason) != _without_digits(one.reason):
            draft.set_replica(one, state=state, reason=reason)

    def _on_lost(self, draft: HealthUpdate, one: ReplicaHealth) -> None:
        """Restart a replica whose lease has ended, or give it up."""
        if one.state in DOWN:
            self._await_return(draft, one)
            return
        draft.lost_ids.append(one.replica_id)
        if not one.supervised:
            draft.add_event(
                one.role, one.instance, Health.FAILED, f"{one.replica_id} is gone, and no supervisor restarts it"
            )
            del draft.replicas[one.instance]
        elif self._no_try_left(one):
            draft.set_replica(self._fail(draft, one, "its heartbeats stopped"), counted_id=one.replica_id)
        else:
            last = f"; its last error: {one.failure}" if one.failure else ""
            draft.restart(one, f"its heartbeats stopped{last}", RestartMode.PROBE)

    def _await_return(self, draft: HealthUpdate, one: ReplicaHealth) -> None:
        """Restart a replica again, or give it up, if its new process has not registered in time."""
        waited = draft.now - one.since
        if one.state == Health.FAILED:
            if self._may_retry(draft, one) and one.supervised:
                draft.restart(one, f"it failed {waited:.0f} s ago: trying again", RestartMode.FORCE)
        elif waited > (timeout := self._timeout(one)):
            why = f"it did not come back within {timeout:g} s"
            if failure := self._failures.get(one.instance):
                why += f": {failure}"
            if self._no_try_left(one):
                self._fail(draft, one, why)
            elif draft.now >= next_restart(one.restarts, self._config, draft.now):
                draft.restart(one, why, RestartMode.FORCE)

    def _timeout(self, one: ReplicaHealth) -> float:
        """Return the seconds to wait for a replica's new process. The time doubles with each attempt."""
        config = self._config
        doubled = Backoff(config.restart_timeout_seconds, config.role_timeout_seconds).pause(max(1, one.tries))
        return max(config.restart_timeout_seconds, doubled)

    def _may_retry(self, draft: HealthUpdate, one: ReplicaHealth) -> bool:
        """Return True if a replica failed more than restart_window_seconds ago, so that another restart is allowed."""
        return one.state == Health.FAILED and draft.now - one.since > self._config.restart_window_seconds

    def _no_try_left(self, one: ReplicaHealth) -> bool:
        """Return True if max_restarts processes of a replica ended without finishing any group."""
        return one.tries >= self._config.max_restarts and not one.seen_working

    def _fail(self, draft: HealthUpdate, one: ReplicaHealth, why: str, *, refused: bool = False) -> ReplicaHealth:
        """Set a replica's state to failed: after its last attempt, or at once if no restart would help."""
        if one.state == Health.FAILED:
            return draft.set_replica(one, reason=why, refused=True) if refused and not one.refused else one
        if one.failure not in why:
            why += f"; its last error: {one.failure}"
        when = "is not restarted, which would not help" if refused else f"failed after {one.tries} tries"
        draft.add_event(one.role, one.instance, Health.FAILED, f"{one.replica_id} {when}: {why}")
        return draft.set_replica(one, state=Health.FAILED, reason=why, refused=refused)


def _without_digits(reason: str) -> str:
    """Remove the digits from a reason for comparison, because numbers in it change with every tick."""
    return "".join(character for character in reason if not character.isdigit())


class RoleReconciler:
    """Decides when to rebuild a run's roles. `failure` is set once the run can't continue."""

    def __init__(self, config: HealthConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._last_hope: dict[str, float] = {}
        """Time at which a role last had a working or starting replica, by role, in seconds of the clock."""
        self.failure: RoleFailure | None = None

    def reset_timers(self) -> None:
        """Restart the timers of all roles."""
        self._last_hope.clear()

    def update(self, draft: HealthUpdate, role: str, live: Mapping[str, Replica], signs: RoleSigns) -> None:
        """Add the decisions about a role to the draft. `live` has the role's registered replicas by instance."""
        one = draft.roles.get(role) or draft.set_role(RoleHealth(role=role, since=draft.now))
        places = [replica for replica in draft.replicas.values() if replica.role == role]
        if role not in signs.missing:
            self._last_hope[role] = self._clock()
            self._record_recovery(draft, one, signs)
            return
        coming = any(
            replica.status.state not in (REPLICA_STATE_FAILED, REPLICA_STATE_DRAINING)
            and not (instance in draft.replicas and draft.replicas[instance].state == Health.FAILED)
            for instance, replica in live.items()
        )
        if coming:  # without a time limit: the checks of single replicas restart one that hangs at its start
            self._last_hope[role] = self._clock()
        absent = self._clock() - self._last_hope.setdefault(role, self._clock())
        exhausted = bool(places) and all(place.state == Health.FAILED for place in places)
        why = places[-1].reason if exhausted else f"no {role} replica for {absent:.0f} s"
        if one.state == Health.HEALTHY:
            one = draft.set_role(one, state=Health.SUSPECT, reason="it has no working replica")
        if one.state == Health.FAILED:
            self.failure = RoleFailure(role, "", one.reason)  # decided by an earlier coordinator
        elif exhausted and all(place.refused for place in places):
            self._fail(draft, one, places[-1].instance, f"{role} can't start: {why}")
        # If users removed all replicas, there is nothing to restart: the paused run waits for new ones.
        elif exhausted or (absent > self._config.role_timeout_seconds and (places or one.state != Health.REBUILDING)):
            self._rebuild_or_fail(draft, one, places[-1].instance if exhausted else "", why, signs)

    def _record_recovery(self, draft: HealthUpdate, one: RoleHealth, signs: RoleSigns) -> None:
        if one.state == Health.REBUILDING:
            draft.add_event(one.role, "", Health.HEALTHY, f"rebuilt after {draft.now - one.since:.1f} s")
        if one.state != Health.HEALTHY:
            one = draft.set_role(one, state=Health.HEALTHY, reason="")
        if one.rebuilds and signs.last_step > one.rebuilt_at_step:
            draft.set_role(one, rebuilds=0)

    def _fail(self, draft: HealthUpdate, one: RoleHealth, instance: str, reason: str) -> None:
        self.failure = RoleFailure(one.role, instance, reason)
        draft.add_event(one.role, "", Health.FAILED, reason)
        draft.set_role(one, state=Health.FAILED, reason=reason)

    def _rebuild_or_fail(self, draft: HealthUpdate, one: RoleHealth, instance: str, why: str, signs: RoleSigns) -> None:
        config, name = self._config, one.role
        if one.rebuilds >= config.max_rebuilds:
            self._fail(draft, one, instance, f"{name} could not be rebuilt: {why} ({one.rebuilds} attempts)")
            return
        if one.rebuilds and draft.now - one.since < Backoff(config.first_backoff_seconds).pause(one.rebuilds):
            return
        self._last_hope[one.role] = self._clock()
        number = one.rebuilds + 1
        text = f"rebuilding {name} ({number} of {config.max_rebuilds}): {why}"
        one = draft.set_role(
            one,
            state=Health.REBUILDING,
            since=draft.now,
            reason=why,
            rebuilds=number,
            rebuilt_at_step=signs.last_step,
            # The first rebuild pauses the run, until the role is back after any number of rebuilds.
            pause=one.pause if one.state == Health.REBUILDING else text,
        )
        draft.add_event(one.role, "", Health.REBUILDING, text)
        for place in [place for place in draft.replicas.values() if place.role == one.role and place.supervised]:
            # Clear the replica's own limits: those of the role apply.
            fresh = draft.set_replica(place, tries=0, restarts=(), seen_working=False)
            draft.restart(
                fresh, f"{name} is rebuilt", RestartMode.FORCE if place.state in DOWN else RestartMode.REQUEST
            )
