"""Second tier of health: a role without any working replica is rebuilt as a whole."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from relaxd.config import HealthConfig
from relaxd.v1.replica_pb2 import REPLICA_STATE_DRAINING, REPLICA_STATE_FAILED
from relaxd.waiting import Backoff
from services.coordinator.fleet.registry import Replica
from services.coordinator.health.health_update import DOWN, HealthUpdate, RestartMode
from services.coordinator.state.health_records import Health, RoleHealth


@dataclass(frozen=True)
class RoleSigns:
    """The state of the run."""

    missing: Collection[str]
    """Names of the roles without a working replica."""
    last_step: int
    """The last committed step."""


class RoleReconciler:
    """Decides on rebuilds of a run's roles. `failure` is set once the run can't continue."""

    def __init__(self, config: HealthConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._last_hope: dict[str, float] = {}
        """Clock time at which a role last had a working or starting replica."""
        self.failure = ""

    def reset_timers(self) -> None:
        """Restart all waits."""
        self._last_hope.clear()

    def update(self, draft: HealthUpdate, role: str, live: Mapping[str, Replica], signs: RoleSigns) -> None:
        """Update the draft for a role; `live`: its registered replicas, by instance."""
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
        if coming:  # without a limit: the first tier restarts a replica that hangs at its start
            self._last_hope[role] = self._clock()
        absent = self._clock() - self._last_hope.setdefault(role, self._clock())
        exhausted = bool(places) and all(place.state == Health.FAILED for place in places)
        why = places[-1].reason if exhausted else f"no {role} replica for {absent:.0f} s"
        if one.state == Health.HEALTHY:
            one = draft.set_role(one, state=Health.SUSPECT, reason="it has no working replica")
        if one.state == Health.FAILED:
            self.failure = one.reason  # decided by an earlier coordinator
        elif exhausted and all(place.refused for place in places):
            self._fail(draft, one, f"{role} can't start: {why}")
        # If users removed all replicas, there is nothing to restart: the paused run waits for new ones.
        elif exhausted or (absent > self._config.role_timeout_seconds and (places or one.state != Health.REBUILDING)):
            self._rebuild_or_fail(draft, one, why, signs)

    def _record_recovery(self, draft: HealthUpdate, one: RoleHealth, signs: RoleSigns) -> None:
        if one.state == Health.REBUILDING:
            draft.add_event(one.role, "", Health.HEALTHY, f"rebuilt after {draft.now - one.since:.1f} s")
        if one.state != Health.HEALTHY:
            one = draft.set_role(one, state=Health.HEALTHY, reason="")
        if one.rebuilds and signs.last_step > one.rebuilt_at_step:
            draft.set_role(one, rebuilds=0)

    def _fail(self, draft: HealthUpdate, one: RoleHealth, failure: str) -> None:
        self.failure = failure
        draft.add_event(one.role, "", Health.FAILED, failure)
        draft.set_role(one, state=Health.FAILED, reason=failure)

    def _rebuild_or_fail(self, draft: HealthUpdate, one: RoleHealth, why: str, signs: RoleSigns) -> None:
        config, name = self._config, one.role
        if one.rebuilds >= config.max_rebuilds:
            self._fail(draft, one, f"{name} could not be rebuilt: {why} ({one.rebuilds} attempts)")
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
