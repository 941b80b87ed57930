"""The decisions on a run's health, from its record and its registered replicas; nothing here acts."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from relaxd.config import RunConfig
from services.coordinator.fleet.registry import Replica
from services.coordinator.health.health_update import HealthUpdate
from services.coordinator.health.replica_reconciler import ReplicaReconciler
from services.coordinator.health.role_reconciler import RoleReconciler, RoleSigns
from services.coordinator.health.signs import Signs


class HealthPolicy:
    """Both tiers of one run's health."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        signs: Signs,
        *,
        roles: Sequence[str],
        restart_failures: Mapping[str, str],
        idle_reason: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`roles` are those that the run needs; `restart_failures` is the error of each instance's last restart;
        `idle_reason` is the fleet's; `clock` is the one of `signs`."""
        self._needed = roles
        self._signs = signs
        self._replicas = ReplicaReconciler(run_id, config.health, self._signs, restart_failures, idle_reason)
        self._roles = RoleReconciler(config.health, clock)

    @property
    def failure(self) -> str:
        """Reason why the run can't continue; empty while it can."""
        return self._roles.failure

    def reset_timers(self) -> None:
        """Restart all waits, except those in the record (HealthRecord.with_reset_timers)."""
        self._signs.reset_timers()
        self._roles.reset_timers()

    def update(self, draft: HealthUpdate, registered: Iterable[Replica], roles: RoleSigns | None) -> None:
        """Add the decisions of this moment to the draft; `roles` is None until the run has started."""
        needed = (one for one in registered if one.registration.role in self._needed)
        live = {one.instance: one for one in sorted(needed, key=lambda one: one.registered_at)}  # the newest of each
        self._replicas.update(draft, live)
        if roles is None:
            return
        for role in self._needed:
            of_role = {instance: replica for instance, replica in live.items() if replica.registration.role == role}
            self._roles.update(draft, role, of_role, roles)
