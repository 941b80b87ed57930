"""Drives one replica of a scale request from the state in its record to the end.

Every change is in Redis before it takes effect, and every call is idempotent: after a restart the drive continues from
the recorded state.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from relaxd.roles import ROLES
from relaxd.v1.launcher_pb2 import INSTANCE_STATE_FAILED, INSTANCE_STATE_PENDING
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED, REPLICA_STATE_IDLE, REPLICA_STATE_READY
from services.coordinator.fleet.registry import Registry, Replica
from services.coordinator.runs.run_manager import RunManager
from services.coordinator.scaling.launchers import LauncherError, Launchers, external_address
from services.coordinator.scaling.scale_log import ScaleLog
from services.coordinator.state.records import ROLLED_BACK, Direction, ScaledReplica, ScaleRecord, ScaleState
from services.coordinator.state.retries import RedisRetry

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.2
POLL_SECONDS = 1.0
"""Seconds between two queries to the launcher about a replica that has not registered."""
RETRY_SECONDS = 0.5
REMOVE_GRACE_SECONDS = 15.0
"""Grace period of a removed replica, in seconds: it is already drained, or was never active."""
REMOVE_SECONDS = 60.0
"""Maximum seconds of further attempts to remove a replica, after the first attempt failed."""
HAND_BACK_SECONDS = 10.0
"""Maximum seconds after the drain deadline for the replica to hand back unfinished groups."""


class ScaleFailed(Exception):
    """The replica will not become active; the message says why."""


class ReplicaDrive:
    """Drives one replica of one scale request."""

    def __init__(
        self,
        launch_id: str,
        request_id: str,
        log: ScaleLog,
        *,
        registry: Registry,
        runs: RunManager,
        launchers: Launchers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns the Unix time that is compared with the request's deadline."""
        self._clock = clock
        self._launch_id = launch_id
        self._request_id = request_id
        self._log = log
        self._registry = registry
        self._runs = runs
        self._launchers = launchers
        self._redis = RedisRetry(f"scale request {request_id}")

    async def run(self) -> None:
        """Drive the replica to a final state. Raises Superseded."""
        out = self._record.spec.direction == Direction.OUT
        if self._scaled.state.can_go_back:
            rolled_back = self._scaled.state == ScaleState.DRAINING
            await (self._bring_up() if out and not rolled_back else self._drain())
        if self._scaled.state == ScaleState.REMOVING:
            await self._remove()

    # --- scale out --------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Create the replica and wait until it is active; on failure continue with REMOVING."""
        try:
            if self._scaled.state == ScaleState.PENDING:
                await self._save(state=ScaleState.CREATING)
            await self._create()
            await self._wait_until_active()
        except ScaleFailed as problem:
            outcome = ScaleState.CANCELLED if self._record.going_back else ScaleState.FAILED
            logger.warning("%s is removed again: %s", self._launch_id, problem)
            await self._save(state=ScaleState.REMOVING, outcome=outcome, detail=str(problem))

    async def _create(self) -> None:
        while not self._replicas():
            self._check_deadline()
            try:
                await self._launchers.create(self._scaled, self._record.spec.role)
                return
            except LauncherError as error:
                if not error.passing:
                    raise ScaleFailed(str(error)) from error
                await self._save(detail=str(error))
            await self._registry.changed.wait(RETRY_SECONDS)  # named: the scale request says it

    async def _wait_until_active(self) -> None:
        looked = time.monotonic()
        while True:
            replica = self._newest()
            state, detail = self._progress(replica)
            self._check_deadline(ended=state == ScaleState.ACTIVE, detail=detail)
            if replica is not None:
                saved = await self._save(
                    unless_going_back=True,
                    state=state,
                    detail=detail,
                    replica_id=replica.replica_id,
                    address=replica.registration.address,
                )
                if saved and state == ScaleState.ACTIVE:
                    return
            if replica is None and time.monotonic() - looked > POLL_SECONDS:
                looked = time.monotonic()
                await self._check_alive()
            await self._registry.changed.wait(TICK_SECONDS)  # named: the scale request says it

    async def _check_alive(self) -> None:
        try:
            instance = await self._launchers.instance(self._scaled)
        except LauncherError as error:
            await self._save(detail=str(error))
            return
        if instance.state == INSTANCE_STATE_FAILED:
            raise ScaleFailed(instance.detail or "it ended")
        await self._save(detail=instance.detail if instance.state == INSTANCE_STATE_PENDING else "")

    def _check_deadline(self, *, ended: bool = False, detail: str = "") -> None:
        """Raise ScaleFailed once the request is cancelled or its deadline has passed."""
        if self._record.going_back:
            raise ScaleFailed("cancelled" if self._record.cancelled else ROLLED_BACK)
        if not ended and self._clock() > self._record.deadline.timestamp():
            reason = detail or self._scaled.detail or "it did not register"
            raise ScaleFailed(f"not active within {self._record.spec.seconds:g} s: {reason}")

    def _progress(self, replica: Replica | None) -> tuple[ScaleState, str]:
        """Return CREATING, SYNCING or ACTIVE for a replica that is being added, and what the replica waits for."""
        if replica is None:
            return ScaleState.CREATING, self._scaled.detail or "it has not registered yet"
        status, active = replica.status, self._runs.active
        if status.state == REPLICA_STATE_FAILED:
            return ScaleState.CREATING, status.detail or "it failed"
        if active is None or not active.assignable:
            idle = status.state == REPLICA_STATE_IDLE
            return (ScaleState.ACTIVE, "") if idle else (ScaleState.CREATING, "it has not reported yet")
        if status.run_id != active.record.run_id or status.state == REPLICA_STATE_IDLE:
            return ScaleState.CREATING, "it has not started the run yet"
        if ROLES[replica.registration.role].weights != "receives":
            ready = status.state == REPLICA_STATE_READY
            return (ScaleState.ACTIVE, "") if ready else (ScaleState.CREATING, status.detail)
        announced = active.sync.announced
        if announced is not None and active.fleet.serves(replica, announced.term):
            return ScaleState.ACTIVE, ""
        if status.state == REPLICA_STATE_READY:
            return ScaleState.SYNCING, active.sync.last_failure or "it waits for weights"
        return ScaleState.CREATING, status.detail or "it is starting"

    # --- scale in ---------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Drain the replica, then continue with REMOVING; if the request is cancelled, end the drain so that the
        replica works again."""
        if self._scaled.state != ScaleState.DRAINING:
            await self._save(state=ScaleState.DRAINING, outcome=ScaleState.DONE, detail="")
        deadline = self._record.deadline.timestamp()
        draining: asyncio.Task[int] | None = None
        try:
            while self._clock() < deadline + HAND_BACK_SECONDS:
                if self._record.cancelled:
                    break
                replica = self._newest()
                if replica is None:  # it died; others get its groups when their leases on the board end
                    break
                for known in self._replicas():
                    if not known.draining:
                        await self._redis.call(self._registry.drain, known, deadline)
                if draining is None:
                    draining = asyncio.create_task(self._request_drain(replica, deadline))
                await asyncio.wait({draining}, timeout=TICK_SECONDS)  # named: the scale request says it
                if draining.done():
                    held = draining.result()
                    if not held:
                        break
                    await self._save(detail=f"it holds {held} groups")
                    draining = None
        finally:
            if draining is not None:
                draining.cancel()
                await asyncio.wait({draining})
        await self._wait_for_sync()
        if self._record.rolled_back:
            await self._save(state=ScaleState.REMOVING, detail=ROLLED_BACK)
        elif not await self._save(unless_going_back=True, state=ScaleState.REMOVING, detail=""):
            await self._undrain()
            await self._save(state=ScaleState.CANCELLED, detail="")

    async def _request_drain(self, replica: Replica, deadline: float) -> int:
        """Ask the replica to drain. Returns the number of groups that it still holds."""
        try:
            return await self._launchers.drain(replica, max(0.0, deadline - self._clock()))
        except LauncherError as error:
            logger.info("%s", error)
            await asyncio.sleep(RETRY_SECONDS)
            return max(1, int(replica.status.held_groups))

    async def _undrain(self) -> None:
        for replica in self._replicas():
            await self._redis.call(self._registry.undrain, replica)

    async def _wait_for_sync(self) -> None:
        """Wait until no weight synchronisation needs the replica, but no longer than one synchronisation may take."""
        began = time.monotonic()
        while not self._record.cancelled:
            active = self._runs.active
            if active is None or not any(active.sync.involves(r.replica_id) for r in self._replicas()):
                return
            weights = active.config.weights
            if time.monotonic() - began > weights.connect_timeout_seconds + weights.timeout_seconds:
                return
            await self._registry.changed.wait(TICK_SECONDS)  # named: the scale request says it

    # --- both directions --------------------------------------------------------------------------------------------

    async def _remove(self) -> None:
        """Remove the replica; if the removal fails, end the drain so that the replica works again."""
        outcome, detail = self._scaled.outcome or ScaleState.FAILED, self._scaled.detail
        end = float("inf")
        while True:
            try:
                await self._launchers.remove(self._scaled, REMOVE_GRACE_SECONDS)
                break
            except LauncherError as error:
                if external_address(self._scaled) and not self._replicas():
                    break  # its process is gone, or it never joined
                end = min(end, time.monotonic() + REMOVE_SECONDS)
                if not error.passing or time.monotonic() > end:
                    await self._undrain()
                    await self._save(state=ScaleState.FAILED, detail=f"{detail}; {error}" if detail else str(error))
                    return
                logger.info("%s: %s; retrying", self._launch_id, error)
            await asyncio.sleep(RETRY_SECONDS)  # named: the scale request says it
        await self._registry.remove(self._replicas())
        await self._save(state=outcome)

    @property
    def _record(self) -> ScaleRecord:
        return self._log.get(self._request_id)

    @property
    def _scaled(self) -> ScaledReplica:
        return self._log.replica(self._request_id, self._launch_id)

    def _replicas(self) -> list[Replica]:
        """Return the registered replicas with the launch id of this drive, oldest first."""
        return self._registry.of_launch(self._launch_id)

    def _newest(self) -> Replica | None:
        replicas = self._replicas()
        return replicas[-1] if replicas else None

    async def _save(self, *, unless_going_back: bool = False, **changes: Any) -> bool:
        """Save changes of the replica's record. Returns False without saving if `unless_going_back` is set and the
        request is cancelled or rolled back."""
        if all(getattr(self._scaled, name) == value for name, value in changes.items()):
            return True
        return await self._log.update_replica(
            self._request_id, self._launch_id, changes, unless_going_back=unless_going_back
        )
