"""One replica of a scale request, brought from the state in its record to its end.

Every change is in Redis before anything follows from it, and every call may be made twice: after a restart the replica
is simply driven on from its recorded state.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_IDLE,
    REPLICA_STATE_READY,
    ROLE_ROLLOUT,
    DrainRequest,
)
from services.coordinator.launchers import LauncherError, Launchers, external_address
from services.coordinator.manager import RunManager
from services.coordinator.peers import Peers
from services.coordinator.registry import Registry, Replica
from services.coordinator.scale_records import Direction, ScaledReplica, ScaleRecord, ScaleState
from services.coordinator.store import StoreUnavailable

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.2
LOOK_SECONDS = 1.0
"""How often the launcher is asked how a replica is that has not registered."""
RETRY_SECONDS = 0.5
REMOVE_GRACE_SECONDS = 15.0
"""What a replica that is removed has to end by itself: it is drained already, or was never active."""
REMOVE_SECONDS = 60.0
"""For how long removing is tried."""
HAND_BACK_SECONDS = 10.0
"""Beyond a drain's deadline: for handing back what was not finished."""


class GivenUp(Exception):
    """A replica will not become active; the message says why."""


class ReplicaDrive:
    """Drives one replica of one request."""

    def __init__(
        self,
        launch_id: str,
        record: Callable[[], ScaleRecord],
        save: Callable[..., Awaitable[bool]],
        registry: Registry,
        runs: RunManager,
        peers: Peers,
        launchers: Launchers,
    ) -> None:
        """`record` is the request as it is now; `save(launch_id, changes, unless_cancelled)` changes this replica of it
        and says whether it did."""
        self._launch_id = launch_id
        self._record = record
        self._save_replica = save
        self._registry = registry
        self._runs = runs
        self._peers = peers
        self._launchers = launchers

    async def run(self) -> None:
        """Do it all; returns at the end of the replica's part. Raises Superseded."""
        out = self._record().wish.direction == Direction.OUT
        if self._scaled.state.can_go_back:
            await (self._bring_up() if out else self._drain())
        if self._scaled.state == ScaleState.REMOVING:
            await self._remove()

    # --- out --------------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Create it and wait until it is active; else REMOVING."""
        try:
            if self._scaled.state == ScaleState.PENDING:
                await self._save(state=ScaleState.CREATING)
            await self._create()
            await self._until_active()
        except GivenUp as problem:
            outcome = ScaleState.CANCELLED if self._record().cancelled else ScaleState.FAILED
            logger.warning("%s is given up: %s", self._launch_id, problem)
            await self._save(state=ScaleState.REMOVING, outcome=outcome, detail=str(problem))

    async def _create(self) -> None:
        while not self._replicas():
            self._check_wanted()
            try:
                await self._launchers.create(self._scaled, self._record().wish.role)
                return
            except LauncherError as error:
                if not error.passing:
                    raise GivenUp(str(error)) from error
                await self._save(detail=str(error))
            await self._registry.changed.wait(RETRY_SECONDS)

    async def _until_active(self) -> None:
        looked = time.monotonic()
        while True:
            replica = self._newest()
            state, detail = self._progress(replica)
            self._check_wanted(ended=state == ScaleState.ACTIVE, detail=detail)
            if replica is not None:
                saved = await self._save(
                    unless_cancelled=True,
                    state=state,
                    detail=detail,
                    replica_id=replica.replica_id,
                    address=replica.registration.address,
                )
                if saved and state == ScaleState.ACTIVE:
                    return
            if replica is None and time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                await self._check_alive()
            await self._registry.changed.wait(TICK_SECONDS)

    async def _check_alive(self) -> None:
        try:
            if failure := await self._launchers.failure(self._scaled):
                raise GivenUp(failure)
        except LauncherError as error:
            await self._save(detail=str(error))

    def _check_wanted(self, *, ended: bool = False, detail: str = "") -> None:
        """Raises GivenUp once the request is cancelled or over."""
        if self._record().cancelled:
            raise GivenUp("cancelled")
        if not ended and time.time() > self._record().deadline.timestamp():
            waited_for = detail or self._scaled.detail or "it did not register"
            raise GivenUp(f"not active within {self._record().wish.seconds:g} s: {waited_for}")

    def _progress(self, replica: Replica | None) -> tuple[ScaleState, str]:
        """How far a replica is, and what it waits for."""
        if replica is None:
            return ScaleState.CREATING, "it has not registered yet"
        status, active = replica.status, self._runs.active
        if status.state == REPLICA_STATE_FAILED:
            return ScaleState.CREATING, status.detail or "it failed"
        if active is None or not active.assignable:
            idle = status.state == REPLICA_STATE_IDLE
            return (ScaleState.ACTIVE, "") if idle else (ScaleState.CREATING, "it has not reported yet")
        if status.run_id != active.record.run_id or status.state == REPLICA_STATE_IDLE:
            return ScaleState.CREATING, "it has not begun with the run yet"
        if replica.registration.role != ROLE_ROLLOUT:
            ready = status.state == REPLICA_STATE_READY
            return (ScaleState.ACTIVE, "") if ready else (ScaleState.CREATING, status.detail)
        announced = active.sync.announced
        if announced is not None and replica in active.fleet.serving(announced.epoch):
            return ScaleState.ACTIVE, ""
        if status.state == REPLICA_STATE_READY:
            return ScaleState.SYNCING, active.sync.last_failure or "it waits for weights"
        return ScaleState.CREATING, status.detail or "it is starting"

    # --- in ---------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Let it finish or hand back what it holds, then REMOVING; a cancelled request lets it work on."""
        await self._save(state=ScaleState.DRAINING, outcome=ScaleState.DONE, detail="")
        deadline = self._record().deadline.timestamp()
        draining: asyncio.Task[int] | None = None
        try:
            while time.time() < deadline + HAND_BACK_SECONDS:
                if self._record().cancelled:
                    break
                replica = self._newest()
                if replica is None:  # it died, and what it held goes to others when their leases on the board end
                    break
                for known in self._replicas():
                    if not known.draining:
                        await self._patiently(self._registry.drain, known, deadline)
                if draining is None:
                    draining = asyncio.create_task(self._ask_to_drain(replica, deadline))
                await asyncio.wait({draining}, timeout=TICK_SECONDS)
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
        await self._until_no_sync()
        if not await self._save(unless_cancelled=True, state=ScaleState.REMOVING, detail=""):
            await self._undrain()
            await self._save(state=ScaleState.CANCELLED, detail="")

    async def _ask_to_drain(self, replica: Replica, deadline: float) -> int:
        """Ask once; returns how many groups it still holds."""
        stub = self._peers.replica(replica.registration.address)
        try:
            answer = await stub.Drain(DrainRequest(), timeout=max(0.0, deadline - time.time()) + 2.0)
            return int(answer.held_groups)
        except grpc.aio.AioRpcError as error:
            logger.info("%s doesn't drain: %s", replica.replica_id, explain(error))
            await asyncio.sleep(RETRY_SECONDS)
            return max(1, int(replica.status.held_groups))

    async def _undrain(self) -> None:
        for replica in self._replicas():
            await self._patiently(self._registry.undrain, replica)

    async def _until_no_sync(self) -> None:
        """Wait until no weight synchronisation would break if the replica went, as long as one may take."""
        began = time.monotonic()
        while not self._record().cancelled:
            active = self._runs.active
            if active is None or not any(active.sync.involves(r.replica_id) for r in self._replicas()):
                return
            weights = active.config.weights
            if time.monotonic() - began > weights.connect_timeout_seconds + weights.timeout_seconds:
                return
            await self._registry.changed.wait(TICK_SECONDS)

    # --- both -------------------------------------------------------------------------------------------------------

    async def _remove(self) -> None:
        """Remove it; where that can't be done, one that was active works on."""
        outcome, detail = self._scaled.outcome or ScaleState.FAILED, self._scaled.detail
        end = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                await self._launchers.remove(self._scaled, REMOVE_GRACE_SECONDS)
                break
            except LauncherError as error:
                if external_address(self._scaled) and not self._replicas():
                    break  # its process is gone, or it never joined
                if not error.passing or time.monotonic() > end:
                    await self._undrain()
                    await self._save(state=ScaleState.FAILED, detail=f"{detail}; {error}" if detail else str(error))
                    return
                logger.info("%s: %s; trying again", self._launch_id, error)
            await asyncio.sleep(RETRY_SECONDS)
        await self._registry.remove(self._replicas())
        await self._save(state=outcome)

    @property
    def _scaled(self) -> ScaledReplica:
        return next(r for r in self._record().scaled if r.launch_id == self._launch_id)

    def _replicas(self) -> list[Replica]:
        """Everything that is registered under the launch id, oldest first."""
        return self._registry.of_launch(self._launch_id)

    def _newest(self) -> Replica | None:
        replicas = self._replicas()
        return replicas[-1] if replicas else None

    async def _save(self, *, unless_cancelled: bool = False, **changes: Any) -> bool:
        """Change the replica's part of the record, if it changes anything. False: the request was cancelled before."""
        if all(getattr(self._scaled, name) == value for name, value in changes.items()):
            return True
        return await self._save_replica(self._launch_id, changes, unless_cancelled)

    async def _patiently(self, operation: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Do something in Redis as soon as Redis is there."""
        while True:
            try:
                return await operation(*arguments)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_SECONDS)
