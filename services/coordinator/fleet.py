"""Which replicas a run has, and which version its engines serve."""

import time

from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_QUARANTINED,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    ROLE_ADVANTAGE,
    ROLE_REWARD,
    ROLE_ROLLOUT,
    ROLE_TRAINER,
    Role,
)
from services.coordinator.registry import Registry, Replica

NEEDED = {"trainer": ROLE_TRAINER, "rollout": ROLE_ROLLOUT, "reward": ROLE_REWARD, "advantage": ROLE_ADVANTAGE}

ABLE = (REPLICA_STATE_READY, REPLICA_STATE_QUARANTINED)
FAILURE_LEASES = 2.5
"""For how many leases a role must have been failing before the run is given up: replicas try again by themselves."""


class Fleet:
    """The registry, seen from one run."""

    def __init__(self, registry: Registry, run_id: str) -> None:
        self.registry = registry
        self.run_id = run_id
        self._failing: dict[str, float] = {}
        """Since when a role is failing, by the monotonic clock."""
        self.set_aside: frozenset[str] = frozenset()
        """Engines that the last synchronisation had to leave out: their version doesn't hold back the others."""

    def trainer(self) -> Replica | None:
        """The run's trainer: the newest one that is ready."""
        ready = [r for r in self._of(ROLE_TRAINER) if r.status.state == REPLICA_STATE_READY]
        return ready[-1] if ready else None

    def has(self, *roles: "Role.ValueType") -> bool:
        """Whether a replica of each role is registered and works on the run, ready or not."""
        return all(self._of(role) for role in roles)

    def engines(self) -> list[Replica]:
        """The engines that can receive weights."""
        return [r for r in self._of(ROLE_ROLLOUT) if r.status.state in ABLE and not r.draining]

    def rewards(self) -> list[Replica]:
        """The reward replicas that can score."""
        return [r for r in self._of(ROLE_REWARD) if r.status.state == REPLICA_STATE_READY and not r.draining]

    def serving(self, epoch: int) -> list[Replica]:
        """The engines that take prompts under a trainer's epoch."""
        return [
            r
            for r in self.engines()
            if r.version is not None and r.version[0] == epoch and r.replica_id not in self.set_aside
        ]

    def devices(self) -> list[Replica]:
        """The replicas that compute: the trainer, and the engines, whether they serve or not."""
        return [*self._of(ROLE_TRAINER), *self._of(ROLE_ROLLOUT)]

    def oldest_version(self, epoch: int) -> int | None:
        """The oldest version on any engine that takes prompts.

        None without such an engine, and while one that an earlier coordinator knew has not been heard of: it may be
        taking prompts under any version, and what it writes would be too old by the time that it is trained.
        """
        if any(replica.unheard for replica in self.registry.of_role(ROLE_ROLLOUT)):
            return None
        return min((r.version[1] for r in self.serving(epoch) if r.version is not None), default=None)

    def missing(self) -> list[str]:
        """Names of the roles without a replica that is ready for the run."""
        return [
            name
            for name, role in NEEDED.items()
            if not any(r.status.state == REPLICA_STATE_READY and not r.draining for r in self._of(role))
            and not (role == ROLE_ROLLOUT and self.engines())
        ]

    def failure(self) -> str | None:
        """Why the run can't go on: a role whose replicas keep failing. None as long as it can.

        Replicas try again what failed, so a failure counts only once it has lasted, and not while one of them tries.
        Call it often.
        """
        now, patience = time.monotonic(), FAILURE_LEASES * self.registry.lease_seconds
        found = None
        for name, role in NEEDED.items():
            replicas = self._of(role)
            failed = [r for r in replicas if r.status.state == REPLICA_STATE_FAILED]
            if not replicas or any(r.status.state in ABLE for r in replicas):
                self._failing.pop(name, None)
            elif failed and not any(r.status.state == REPLICA_STATE_STARTING for r in replicas):
                reason = f"{name} {failed[-1].replica_id} failed: {failed[-1].status.detail or 'no reason given'}"
                since = self._failing.setdefault(name, now)
                found = reason if now - since > patience else found
        return found

    def _of(self, role: "Role.ValueType") -> list[Replica]:
        return self.registry.of_role(role, self.run_id)
