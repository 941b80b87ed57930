"""Detects unhealthy replicas from their heartbeats; takes no action."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from relaxd.config import RunConfig
from relaxd.roles import ROLES
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED, REPLICA_STATE_READY, REPLICA_STATE_STARTING
from services.coordinator.fleet.registry import Replica
from services.coordinator.weights.gpu_handoff import HandoffFailure

SENDER_PATIENCE = 3
"""Factor on max_sync_failures for the trainer, which sends the weights but causes few of the failures."""


HandoffFailureOf = Callable[[Replica], tuple[HandoffFailure, bool] | None]


@dataclass(frozen=True)
class HealthIssue:
    """A problem of a replica."""

    text: str
    due: bool
    """True if the problem has lasted long enough that the replica should be restarted."""
    final: bool = False
    """True if no restart would help: the settings or the model are wrong."""


@dataclass
class _Watch:
    """Observations of one replica's process. Times are in seconds of the clock of `HealthSignals`."""

    registered_at: float
    progress: int
    state_and_detail: tuple[int, str]
    progressed_at: float
    """Time at which the replica last made progress or had no work."""
    changed_at: float
    """Time at which the replica's state, detail or progress last changed."""
    failed_at: float | None = None
    """Time of the replica's first failure since it last worked; None if there was none."""


class HealthSignals:
    """Detects problems of one run's replicas."""

    def __init__(
        self,
        config: RunConfig,
        heartbeat_seconds: float,
        *,
        sync_failures: Callable[[Replica], int],
        sync_refusal: Callable[[Replica], str] = lambda replica: "",
        sync_error: Callable[[], str] = lambda: "",
        handoff_failure: HandoffFailureOf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without observations. `sync_failures` returns how many consecutive weight synchronisations failed
        because of a replica. `sync_refusal` returns why a replica permanently refuses the weights, or "". `sync_error`
        returns the last synchronisation's error.

        `handoff_failure` returns a colocated replica's failed GPU handoff, and True if the failure has lasted long
        enough to restart the replica. It is None in a run whose roles take no turns on GPUs. `clock` is the registry's.
        """
        self._config = config
        self._clock = clock
        self._late_seconds = 3 * heartbeat_seconds
        self._sync_failures = sync_failures
        self._sync_refusal = sync_refusal
        self._sync_error = sync_error
        self._handoff_failure = handoff_failure
        self._watches: dict[str, _Watch] = {}

    def reset_timers(self) -> None:
        """Forget all observations, so that all timers start again, after an outage of Redis or the coordinator."""
        self._watches.clear()

    def stuck_seconds(self, role: str) -> float:
        """Return the maximum seconds without progress for a replica that holds groups.

        This is longer than the role's timeouts.
        """
        return self._config.health.stuck_seconds + ROLES[role].timeout_seconds(self._config)

    def issue(self, replica: Replica) -> HealthIssue | None:
        """Return the most urgent problem of a replica; None if there is none. Call it at every tick."""
        if replica.unheard or not replica.status.state or replica.draining:
            return None
        now = self._clock()
        watch = self._watched(replica, now)
        health, status = self._config.health, replica.status
        if now - replica.seen > self._late_seconds:
            return HealthIssue(f"no heartbeat for {now - replica.seen:.1f} s", due=False)
        if status.state == REPLICA_STATE_FAILED and watch.failed_at is not None:
            text = f"it has failed: {status.detail or 'no reason given'}"
            refused = status.start_refused
            return HealthIssue(text, due=refused or now - watch.failed_at > health.failed_seconds, final=refused)
        if status.state == REPLICA_STATE_STARTING:
            text = f"it has been starting for {now - watch.changed_at:.0f} s: {status.detail or 'no detail given'}"
            return _after(now - watch.changed_at, health.start_seconds, text)
        found = [self._sync_issue(replica), self._handoff_issue(replica), self._progress_issue(replica, watch, now)]
        issues = [one for one in found if one is not None]
        # An engine that fails synchronisations may also be stuck, with groups that others wait for.
        return next((one for one in issues if one.due), next(iter(issues), None))

    def _sync_issue(self, replica: Replica) -> HealthIssue | None:
        """Return an issue if weight synchronisations have failed because of the replica."""
        if refusal := self._sync_refusal(replica):
            return HealthIssue(f"it refuses the trainer's weights: {refusal}", due=True, final=True)
        failures = self._sync_failures(replica)
        limit = self._config.health.max_sync_failures
        if ROLES[replica.registration.role].weights == "sends":
            failures, limit = failures - 1, limit * SENDER_PATIENCE  # one may come from its own restart
        if failures <= 0:
            return None
        error = f": {error}" if (error := self._sync_error()) else ""
        text = f"{failures} weight synchronisations in a row failed with it{error}"
        return HealthIssue(text, due=failures >= limit)

    def _handoff_issue(self, replica: Replica) -> HealthIssue | None:
        """Return an issue if the GPU handoff to or from the replica has failed."""
        failure = self._handoff_failure(replica) if self._handoff_failure is not None else None
        return None if failure is None else HealthIssue(str(failure[0]), due=failure[1])

    def _progress_issue(self, replica: Replica, watch: _Watch, now: float) -> HealthIssue | None:
        """Return an issue if the replica has work but makes no progress."""
        status = replica.status
        if status.state != REPLICA_STATE_READY:
            return None
        idle_seconds = now - watch.progressed_at
        text = f"it is stuck: it holds {status.held_groups} groups and has made no progress for {idle_seconds:.0f} s"
        return _after(idle_seconds, self.stuck_seconds(replica.registration.role), text)

    def _watched(self, replica: Replica, now: float) -> _Watch:
        status = replica.status
        state_and_detail = (int(status.state), status.detail)
        watch = self._watches.get(replica.replica_id)
        if watch is None or watch.registered_at != replica.registered_at:
            watch = _Watch(replica.registered_at, status.progress, state_and_detail, progressed_at=now, changed_at=now)
            self._watches[replica.replica_id] = watch
        role = ROLES[replica.registration.role]
        idle = not status.held_groups and not role.always_busy
        idle = idle or (role.weights == "receives" and not status.HasField("weights"))
        if status.progress != watch.progress or idle or status.state != REPLICA_STATE_READY:
            watch.progressed_at = now
        if state_and_detail != watch.state_and_detail or status.progress != watch.progress:
            watch.changed_at = now
        watch.progress, watch.state_and_detail = status.progress, state_and_detail
        if status.state == REPLICA_STATE_FAILED:
            watch.failed_at = now if watch.failed_at is None else watch.failed_at
        elif status.state != REPLICA_STATE_STARTING:  # a starting replica may fail again
            watch.failed_at = None
        return watch


def _after(seconds: float, limit: float, text: str) -> HealthIssue | None:
    """Return an issue once half of the time limit has passed. It is due once the whole limit has passed."""
    return HealthIssue(text, due=seconds > limit) if seconds > limit / 2 else None
