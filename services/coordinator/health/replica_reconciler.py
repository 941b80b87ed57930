"""First tier: what follows from how each replica is. Changes a draft only; see health.py for what is done then."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from relaxd import telemetry
from relaxd.config import HealthConfig
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_QUARANTINED,
    REPLICA_STATE_READY,
    Role,
)
from services.coordinator.fleet.registry import Replica
from services.coordinator.health.health_update import DOWN, HealthUpdate, Way, next_restart
from services.coordinator.health.signs import HealthIssue, Signs
from services.coordinator.state.health_records import Health, ReplicaHealth

logger = logging.getLogger(__name__)

CHANGED_ITS_MIND_SECONDS = 10.0
"""A process that was told to go and is there after this is still at work."""


class ReplicaReconciler:
    """Looks after the replicas of one run, one by one."""

    def __init__(self, run_id: str, config: HealthConfig, signs: Signs, troubles: Mapping[str, str]) -> None:
        """`troubles`: why asking for a restart came to nothing, by instance."""
        self._run_id = run_id
        self._config = config
        self._signs = signs
        self._troubles = troubles
        self._leaving: dict[str, str] = {}
        """Replica ids, by instance, of those that are drained: that they go is as it should be."""

    def look(self, draft: HealthUpdate, live: Mapping[str, Replica]) -> None:
        """Bring the draft up to date with the newest replica of each instance that is registered."""
        for instance, replica in live.items():
            one = draft.replicas.get(instance)
            if replica.draining or replica.status.state == REPLICA_STATE_DRAINING:
                if one is None or one.state not in DOWN:
                    self._leaving[instance] = replica.replica_id
                    draft.replicas.pop(instance, None)
                continue
            left = self._leaving.pop(instance, replica.replica_id)
            if left != replica.replica_id:
                draft.gone.append(left)
            one = one or self._new(draft, replica)
            if one.replica_id != replica.replica_id:
                one = self._successor(draft, one, replica)
            self._judge(draft, one, replica)
        for instance in [instance for instance in self._leaving if instance not in live]:
            draft.gone.append(self._leaving.pop(instance))
        for instance in [instance for instance in draft.replicas if instance not in live]:
            self._missing(draft, draft.replicas[instance])

    def _new(self, draft: HealthUpdate, replica: Replica) -> ReplicaHealth:
        registration = replica.registration
        one = ReplicaHealth(
            instance=replica.instance,
            role=Role.Name(registration.role).removeprefix("ROLE_"),
            replica_id=replica.replica_id,
            address=registration.address,
            supervised=bool(registration.instance),
            since=time.time(),
        )
        return draft.set_replica(one)

    def _successor(self, draft: HealthUpdate, one: ReplicaHealth, replica: Replica) -> ReplicaHealth:
        """Another process has taken the place of the one that was known."""
        draft.gone.append(one.replica_id)
        changes = {"replica_id": replica.replica_id, "address": replica.registration.address, "seen_working": False}
        if one.state in DOWN:
            return draft.set_replica(one, **changes)
        text = f"{one.replica_id} died, and {replica.replica_id} has taken its place"
        draft.tell(one.role, one.instance, Health.RESTARTING, text)
        tries = 1 if one.seen_working else one.tries + 1
        return draft.set_replica(one, **changes, state=Health.RESTARTING, reason=text, tries=tries)

    def _judge(self, draft: HealthUpdate, one: ReplicaHealth, replica: Replica) -> None:
        """A replica that is there."""
        complaint = self._signs.complaint(replica)
        if one.state in DOWN and replica.replica_id == one.told_id:
            ready = replica.status.state == REPLICA_STATE_READY and complaint is None
            if ready and time.time() - one.since > CHANGED_ITS_MIND_SECONDS:
                self._works(draft, one, f"{one.replica_id} works again, as it was")
            else:
                self._waiting(draft, one)
        elif complaint is not None and complaint.due:
            self._restart(draft, one, complaint)
        elif one.state in DOWN:
            if replica.status.state in (REPLICA_STATE_READY, REPLICA_STATE_QUARANTINED):
                self._works(draft, one, f"{one.replica_id} works after {time.time() - one.down_since:.1f} s")
        else:
            changes: dict[str, Any] = {"state": Health.HEALTHY, "reason": ""}
            if complaint is not None:
                same = _shape(complaint.text) == _shape(one.reason)
                changes = {"state": Health.SUSPECT, "reason": one.reason if same else complaint.text}
            if replica.status.done_groups > 0 and not one.seen_working:
                changes |= {"seen_working": True, "tries": 0}
            if any(getattr(one, name) != value for name, value in changes.items()):
                draft.set_replica(one, **changes)

    def _works(self, draft: HealthUpdate, one: ReplicaHealth, text: str) -> None:
        draft.tell(one.role, one.instance, Health.HEALTHY, text)
        labels = {"relaxd.run_id": self._run_id, "relaxd.role": one.role.lower()}
        telemetry.record("health.recovery_seconds", time.time() - one.down_since, labels)
        draft.set_replica(one, state=Health.HEALTHY, reason="", told_id="")

    def _restart(self, draft: HealthUpdate, one: ReplicaHealth, complaint: HealthIssue) -> None:
        """A replica that is there and has to go, if it may."""
        allowed_at = next_restart(one.restarts, self._config)
        reason = complaint.text
        if not one.supervised:
            reason += "; nobody would start it again (it has no RELAXD_INSTANCE): restart it by hand"
        elif one.tries >= self._config.max_restarts and not one.seen_working and not self._forgiven(one):
            self._give_up(draft, one, complaint.text)
            return
        elif time.time() < allowed_at:
            reason += f"; restarted {len(one.restarts)} times already: again in {allowed_at - time.time():.0f} s"
        else:
            draft.restart(one, complaint.text)
            return
        state = one.state if one.state in DOWN else Health.SUSPECT
        if state != one.state or _shape(reason) != _shape(one.reason):
            draft.set_replica(one, state=state, reason=reason)

    def _missing(self, draft: HealthUpdate, one: ReplicaHealth) -> None:
        """A replica that is not registered any more."""
        if one.state in DOWN:
            self._waiting(draft, one)
            return
        draft.gone.append(one.replica_id)
        if not one.supervised:
            draft.tell(one.role, one.instance, Health.FAILED, f"{one.replica_id} is gone; nobody starts it again")
            del draft.replicas[one.instance]
        else:
            draft.restart(one, "no heartbeat came any more", Way.PROBE)

    def _waiting(self, draft: HealthUpdate, one: ReplicaHealth) -> None:
        """A replica whose next process is awaited."""
        waited = time.time() - one.since
        if one.state == Health.FAILED:
            if self._forgiven(one) and one.supervised:
                draft.restart(one, f"it was given up {waited:.0f} s ago: one more try", Way.INSIST)
        elif waited > (patience := self._patience(one)):
            why = f"it did not come back within {patience:g} s"
            if trouble := self._troubles.get(one.instance):
                why += f": {trouble}"
            if one.tries >= self._config.max_restarts:
                self._give_up(draft, one, why)
            elif time.time() >= next_restart(one.restarts, self._config):
                draft.restart(one, why, Way.INSIST)

    def _patience(self, one: ReplicaHealth) -> float:
        """For how long its next process is awaited: twice as long each time, for one that is slow to start."""
        config = self._config
        doubled = config.restart_timeout_seconds * 2.0 ** max(0, one.tries - 1)
        return max(config.restart_timeout_seconds, min(doubled, config.role_timeout_seconds))

    def _forgiven(self, one: ReplicaHealth) -> bool:
        """Whether it was given up so long ago that it is tried once more."""
        return one.state == Health.FAILED and time.time() - one.since > self._config.restart_window_seconds

    def _give_up(self, draft: HealthUpdate, one: ReplicaHealth, why: str) -> None:
        if one.state == Health.FAILED:
            return
        text = f"{one.replica_id} is given up after {one.tries} tries: {why}"
        draft.tell(one.role, one.instance, Health.FAILED, text)
        draft.set_replica(one, state=Health.FAILED, reason=why)


def _shape(reason: str) -> str:
    """A reason without its numbers, which change all the time."""
    return "".join(character for character in reason if not character.isdigit())
