"""The fleet of one run: its replicas, the versions on its engines, and the objects that the run's modules share."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from relaxd.config import RunConfig
from relaxd.roles import ROLES, ROLLOUT, TRAINER
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_QUARANTINED,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
)
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry, Replica
from services.coordinator.state.records import RoleFailure
from services.coordinator.state.store import AsyncStore, RunBoard

ABLE = (REPLICA_STATE_READY, REPLICA_STATE_QUARANTINED)
FAILURE_LEASES = 2.5
"""Number of lease durations for which a role must keep failing before the run fails: replicas retry by themselves."""


class Fleet:
    """One run's view of the registry."""

    def __init__(
        self, registry: Registry, run_id: str, roles: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = registry
        self.run_id = run_id
        self.roles = tuple(roles)
        """Names of the roles that the run needs."""
        self._clock = clock
        self._failing: dict[str, float] = {}
        """Time at which each role's current failures began, by role, in seconds of the clock."""
        self._excluded: frozenset[str] = frozenset()
        """Ids of engines excluded from weight synchronisation. The admission gate ignores their old weight versions,
        which would stop the publishing of prompts."""
        self.given_up: frozenset[str] = frozenset()
        """Instances of replicas that the health manager has given up."""

    def trainer(self) -> Replica | None:
        """Return the newest trainer that is ready; None if no trainer is."""
        ready = (r for r in reversed(self.of_role(TRAINER)) if r.status.state == REPLICA_STATE_READY)
        return next(ready, None)

    def newest(self, role: str) -> Replica | None:
        """Return the newest replica of a role that works on the run, ready or not."""
        return max(self.of_role(role), key=lambda replica: replica.registered_at, default=None)

    def has(self, *roles: str) -> bool:
        """Return True if each of the roles has a replica that works on the run, ready or not."""
        return all(self.of_role(role) for role in roles)

    def engines(self) -> list[Replica]:
        """Return the engines that can receive weights."""
        return [r for r in self.of_role(ROLLOUT) if r.status.state in ABLE and not r.draining]

    def candidates(self) -> list[Replica]:
        """Return the engines that can receive weights and are not excluded."""
        return [engine for engine in self.engines() if engine.replica_id not in self._excluded]

    def exclude(self, replica_ids: Iterable[str]) -> None:
        """Exclude exactly these engines from weight synchronisation."""
        self._excluded = frozenset(replica_ids)

    def ready(self, role: str) -> list[Replica]:
        """Return the replicas of a role that are ready and not draining."""
        return [r for r in self.of_role(role) if r.status.state == REPLICA_STATE_READY and not r.draining]

    def serving(self, term: int) -> list[Replica]:
        """Return the engines that serve weights of a trainer's term, and so take prompts."""
        return [r for r in self.candidates() if r.version is not None and r.version[0] == term]

    def serves(self, replica: Replica, term: int) -> bool:
        """Return True if `serving` would return this replica."""
        works = replica.registration.role == ROLLOUT and replica.status.run_id == self.run_id
        able = replica.status.state in ABLE and not replica.draining and replica.replica_id not in self._excluded
        return works and able and replica.version is not None and replica.version[0] == term

    def give_up(self, instances: Iterable[str]) -> None:
        """Replace the given-up instances.

        They take part only if their role lacks other replicas (see `idle_reason`).
        """
        self.given_up = frozenset(instances)

    def idle_reason(self, replica_id: str) -> str:
        """Return why a replica stands by: the run has the maximum number of replicas of its role. "" if it takes part.

        Replicas take part in the order of registration; draining and given-up replicas come last. So a standby takes
        over when a replica is lost.
        """
        replica = self.registry.get(replica_id)
        role = replica.registration.role if replica is not None else ""
        if replica is None or role not in self.roles or not (most := ROLES[role].most):
            return ""
        ranked = sorted(self.registry.of_role(role), key=lambda one: (one.draining, one.instance in self.given_up))
        if replica in (first := ranked[:most]):
            return ""
        names = ", ".join(one.replica_id for one in first)
        return f"it stands by, and takes over from {names}: run {self.run_id} takes no more than {most} {role}"

    def devices(self) -> list[Replica]:
        """Return the run's replicas of roles that hold a model, in any state."""
        return [replica for role in self.roles if ROLES[role].model for replica in self.of_role(role)]

    def oldest_version(self, term: int) -> int | None:
        """Return the oldest weight version that any engine serves.

        None if no engine serves, or while an engine of an earlier coordinator has sent no heartbeat: its version is
        unknown, and its samples could be too stale to train on.
        """
        if any(replica.unheard for replica in self.registry.of_role(ROLLOUT)):
            return None
        return min((r.version[1] for r in self.serving(term) if r.version is not None), default=None)

    def missing(self) -> list[str]:
        """Return the names of the run's roles that have no ready replica."""
        return [
            role
            for role in self.roles
            if not self.ready(role) and not (ROLES[role].weights == "receives" and self.engines())
        ]

    def failure(self) -> RoleFailure | None:
        """Return the failure of a role whose replicas keep failing; None while the run can continue.

        Replicas retry by themselves, so a failure counts only after FAILURE_LEASES, and not while a replica is
        starting. It counts at once if all failed replicas report a refused start. Call it several times per lease.
        """
        now, patience = self._clock(), FAILURE_LEASES * self.registry.lease_seconds
        found = None
        for role in self.roles:
            replicas = self.of_role(role)
            failed = [r for r in replicas if r.status.state == REPLICA_STATE_FAILED]
            if not replicas or any(r.status.state in ABLE for r in replicas):
                self._failing.pop(role, None)
            elif failed and not any(r.status.state == REPLICA_STATE_STARTING for r in replicas):
                last = failed[-1]
                reason = f"{role} {last.replica_id} failed: {last.status.detail or 'no reason given'}"
                since = self._failing.setdefault(role, now)
                refused = all(replica.status.start_refused for replica in failed)
                if refused or now - since > patience:
                    found = RoleFailure(role, last.instance, reason)
        return found

    def of_role(self, role: str) -> list[Replica]:
        """Return the replicas of a role that work on the run, in any state."""
        return self.registry.of_role(role, self.run_id)


@dataclass(frozen=True)
class RunContext:
    """Context that publishing, evaluation, weight synchronisation and health of one run share."""

    run_id: str
    config: RunConfig
    board: RunBoard
    store: AsyncStore
    fleet: Fleet
    peers: Peers
    launcher: str = ""
    """Address of the launcher; "" if there is none."""

    @property
    def registry(self) -> Registry:
        """The registry with the replicas of all runs."""
        return self.fleet.registry

    @property
    def term(self) -> int:
        """This coordinator's fencing term."""
        return self.store.term
