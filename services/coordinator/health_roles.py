"""Second tier: a role that the first tier can't bring back, so that no replica of it works, is rebuilt as a whole."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from relaxd.config import HealthConfig
from relaxd.v1.replica_pb2 import REPLICA_STATE_DRAINING, REPLICA_STATE_FAILED
from services.coordinator.health_draft import DOWN, Draft, Way
from services.coordinator.health_records import Health, RoleHealth
from services.coordinator.registry import Replica


@dataclass(frozen=True)
class RoleSigns:
    """How the run is."""

    missing: Collection[str]
    """Names of the roles without a replica that works."""
    last_step: int
    """Steps that are committed."""


class SecondTier:
    """Looks after the roles of one run. `failure` says why the run can't go on, once it can't."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._hope: dict[str, float] = {}
        """Monotonic time at which a role last had a replica that worked or was on its way."""
        self.failure = ""

    def forgive(self) -> None:
        """Begin all waits anew."""
        self._hope.clear()

    def look(self, draft: Draft, role: str, live: Mapping[str, Replica], signs: RoleSigns) -> None:
        """Bring the draft up to date with a role; `live` are the replicas of it that are registered."""
        one = draft.roles.get(role) or draft.set_role(RoleHealth(role=role, since=time.time()))
        places = [replica for replica in draft.replicas.values() if replica.role == role]
        if role.lower() not in signs.missing:
            self._hope[role] = time.monotonic()
            self._works(draft, one, signs)
            return
        coming = any(
            replica.status.state not in (REPLICA_STATE_FAILED, REPLICA_STATE_DRAINING)
            and not (instance in draft.replicas and draft.replicas[instance].state == Health.FAILED)
            for instance, replica in live.items()
        )
        if coming:  # however long that takes: one that hangs as it starts is the first tier's
            self._hope[role] = time.monotonic()
        absent = time.monotonic() - self._hope.setdefault(role, time.monotonic())
        exhausted = bool(places) and all(place.state == Health.FAILED for place in places)
        why = places[-1].reason if exhausted else f"no {role.lower()} replica has been there for {absent:.0f} s"
        if one.state == Health.HEALTHY:
            one = draft.set_role(one, state=Health.SUSPECT, reason="no replica of it works")
        if one.state == Health.FAILED:
            self.failure = one.reason  # an earlier coordinator came as far as this
        # Where people have taken all replicas away there is nothing to bring back: paused, the run waits for others.
        elif exhausted or (absent > self._config.role_timeout_seconds and (places or one.state != Health.REBUILDING)):
            self._rebuild_or_fail(draft, one, why, signs)

    def _works(self, draft: Draft, one: RoleHealth, signs: RoleSigns) -> None:
        if one.state == Health.REBUILDING:
            draft.tell(one.role, "", Health.HEALTHY, f"rebuilt after {time.time() - one.since:.1f} s")
        if one.state != Health.HEALTHY:
            one = draft.set_role(one, state=Health.HEALTHY, reason="")
        if one.rebuilds and signs.last_step > one.rebuilt_at_step:
            draft.set_role(one, rebuilds=0)

    def _rebuild_or_fail(self, draft: Draft, one: RoleHealth, why: str, signs: RoleSigns) -> None:
        config, name = self._config, one.role.lower()
        if one.rebuilds >= config.max_rebuilds:
            self.failure = f"{name} could not be brought back: {why} (rebuilt {one.rebuilds} times)"
            draft.tell(one.role, "", Health.FAILED, self.failure)
            draft.set_role(one, state=Health.FAILED, reason=self.failure)
            return
        backoff = config.first_backoff_seconds * 2 ** (one.rebuilds - 1) if one.rebuilds else 0.0
        if one.rebuilds and time.time() - one.since < backoff:
            return
        self._hope[one.role] = time.monotonic()
        number = one.rebuilds + 1
        text = f"rebuilding {name} ({number} of {config.max_rebuilds}): {why}"
        one = draft.set_role(
            one,
            state=Health.REBUILDING,
            since=time.time(),
            reason=why,
            rebuilds=number,
            rebuilt_at_step=signs.last_step,
            # The run is paused for the first rebuild, and goes on when the role is back, however many it took.
            pause=one.pause if one.state == Health.REBUILDING else text,
        )
        draft.tell(one.role, "", Health.REBUILDING, text)
        for place in [place for place in draft.replicas.values() if place.role == one.role and place.supervised]:
            # From the beginning: its limits are those of its own, and the role has others.
            fresh = draft.set_replica(place, tries=0, restarts=(), seen_working=False)
            draft.restart(fresh, f"{name} is rebuilt", Way.INSIST if place.state in DOWN else Way.TELL)
