"""Telling from heartbeats whether a replica is well. Nothing here acts."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from relaxd.config import RunConfig
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    ROLE_REWARD,
    ROLE_ROLLOUT,
    ROLE_TRAINER,
    Role,
)
from services.coordinator.fleet.registry import Replica

TRAINER_PATIENCE = 3
"""A trainer may fail so many times the synchronisations that an engine may: mostly it is not its fault."""


@dataclass(frozen=True)
class HealthIssue:
    """What is wrong with a replica."""

    text: str
    due: bool
    """It has been so for long enough: the replica is to be restarted."""


@dataclass
class _Watch:
    """What was seen of one process; times are monotonic."""

    registered_at: float
    progress: int
    face: tuple[int, str]
    """State and detail."""
    moved: float
    """When it last got something done, or had nothing to do."""
    spoke: float
    """When its state or detail changed, or it got something done."""
    failing: float | None = None


class Signs:
    """Watches the replicas of one run."""

    def __init__(self, config: RunConfig, heartbeat_seconds: float, sync_failures: Callable[[Replica], int]) -> None:
        """`sync_failures`: weight synchronisations in a row that failed because of a replica."""
        self._config = config
        self._late_seconds = 3 * heartbeat_seconds
        self._sync_failures = sync_failures
        self._watches: dict[str, _Watch] = {}

    def forgive(self) -> None:
        """Begin all waits anew: nobody could work, or be heard."""
        self._watches.clear()

    def stuck_seconds(self, role: "Role.ValueType") -> float:
        """For how long a replica that holds groups may get nothing done: longer than it takes to notice by itself."""
        config = self._config
        own = {
            ROLE_ROLLOUT: config.weights.timeout_seconds + config.weights.connect_timeout_seconds,
            ROLE_REWARD: config.reward.timeout_seconds,
            ROLE_TRAINER: config.trainer.collective_timeout_seconds,
        }
        return config.health.stuck_seconds + own.get(role, 0.0)

    def complaint(self, replica: Replica) -> HealthIssue | None:
        """What is wrong with a replica, if anything is. Call it often."""
        if replica.unheard or not replica.status.state or replica.draining:
            return None
        now = time.monotonic()
        watch = self._watched(replica, now)
        health, status = self._config.health, replica.status
        if now - replica.seen > self._late_seconds:
            return HealthIssue(f"no heartbeat for {now - replica.seen:.1f} s", due=False)
        if status.state == REPLICA_STATE_FAILED and watch.failing is not None:
            what = f"it has failed: {status.detail or 'no reason given'}"
            return HealthIssue(what, due=now - watch.failing > health.failed_seconds)
        if status.state == REPLICA_STATE_STARTING:
            what = f"it has been starting for {now - watch.spoke:.0f} s: {status.detail or 'no detail given'}"
            return _after(now - watch.spoke, health.start_seconds, what)
        found = [self._of_synchronisations(replica), self._of_progress(replica, watch, now)]
        complaints = [one for one in found if one is not None]
        # An engine that is left out of synchronisations may be stuck as well, and its groups are waited for.
        return next((one for one in complaints if one.due), next(iter(complaints), None))

    def _of_synchronisations(self, replica: Replica) -> HealthIssue | None:
        """What weight synchronisations say of a replica."""
        failures = self._sync_failures(replica)
        most = self._config.health.max_sync_failures
        if replica.registration.role == ROLE_TRAINER:
            failures, most = failures - 1, most * TRAINER_PATIENCE  # one may be the trace of its own restart
        if failures <= 0:
            return None
        return HealthIssue(f"{failures} weight synchronisations in a row failed with it", due=failures >= most)

    def _of_progress(self, replica: Replica, watch: _Watch, now: float) -> HealthIssue | None:
        """What comes of a replica's work."""
        status = replica.status
        if status.state != REPLICA_STATE_READY:
            return None
        silent = now - watch.moved
        what = f"it is stuck: it holds {status.held_groups} groups and has got nothing done for {silent:.0f} s"
        return _after(silent, self.stuck_seconds(replica.registration.role), what)

    def _watched(self, replica: Replica, now: float) -> _Watch:
        status = replica.status
        face = (int(status.state), status.detail)
        watch = self._watches.get(replica.replica_id)
        if watch is None or watch.registered_at != replica.registered_at:
            watch = _Watch(replica.registered_at, status.progress, face, moved=now, spoke=now)
            self._watches[replica.replica_id] = watch
        # The trainer's loop turns whatever it waits for; the others have nothing to do without groups, and an engine
        # can't do anything without weights.
        idle = not status.held_groups and replica.registration.role != ROLE_TRAINER
        idle = idle or (replica.registration.role == ROLE_ROLLOUT and not status.HasField("weights"))
        if status.progress != watch.progress or idle or status.state != REPLICA_STATE_READY:
            watch.moved = now
        if face != watch.face or status.progress != watch.progress:
            watch.spoke = now
        watch.progress, watch.face = status.progress, face
        if status.state != REPLICA_STATE_FAILED:
            watch.failing = None
        elif watch.failing is None:
            watch.failing = now
        return watch


def _after(seconds: float, limit: float, what: str) -> HealthIssue | None:
    """A complaint from half of a limit on, due after all of it."""
    return HealthIssue(what, due=seconds > limit) if seconds > limit / 2 else None
