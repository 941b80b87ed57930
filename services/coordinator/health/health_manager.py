"""The health manager of a run: detects dead and stuck replicas, restarts them by a call or by their launcher, or fails
the run.

Every half second it compares the registry with its record. Each decision is saved in Redis first, under the
coordinator's term, and then carried out, so that the next coordinator continues where this one ended.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

import grpc

from relaxd import telemetry
from relaxd.board import BoardUnavailable
from relaxd.roles import ROLES
from relaxd.rpc.errors import RpcError, explain
from relaxd.v1.launcher_pb2 import LauncherRestartRequest
from relaxd.v1.replica_pb2 import GetStatusRequest, RestartRequest
from relaxd.waiting import steady_time
from services.coordinator.fleet.checkpoints import save_checkpoint
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.health.detection import HealthSignals
from services.coordinator.health.policy import HealthPolicy, HealthUpdate, RestartMode, RestartOrder, RoleSigns
from services.coordinator.state.records import Health, HealthRecord, Phase, RoleFailure, RunRecord
from services.coordinator.state.store import StoreUnavailable
from services.coordinator.weights.gpu_handoff import GpuHandoff
from services.coordinator.weights.weight_sync import WeightSync

logger = logging.getLogger(__name__)

CALL_SECONDS = 3.0
"""Deadline of calls that only set a flag, in seconds. A replica that misses it counts as frozen."""
PROBES = 2
"""Number of unanswered status calls after which a replica without heartbeats counts as frozen."""
LAUNCHER_SECONDS = 40.0


class Restarter:
    """Restarts the replicas of one run."""

    def __init__(self, peers: Peers, launcher: str) -> None:
        """`launcher` is the launcher's address; "" if there is none."""
        self._peers = peers
        self._launcher = launcher
        self.failures: dict[str, str] = {}
        """Error of the last attempt to restart a replica, by instance."""

    async def restart(self, order: RestartOrder) -> bool:
        """Restart a replica. Return False if the launcher doesn't know the replica, which then never comes back."""
        self.failures.pop(order.instance, None)
        if order.mode == RestartMode.REQUEST and await self._request(order):
            return True
        if order.mode == RestartMode.PROBE and not await self._frozen(order):
            return True
        if not self._launcher:
            self.failures[order.instance] = "it doesn't answer, and this coordinator has no launcher to kill it"
            return True
        # Without FORCE the launcher must not kill a newer process of the instance.
        request = LauncherRestartRequest(
            instance=order.instance, replica_id="" if order.mode == RestartMode.FORCE else order.replica_id
        )
        try:
            answer = await self._peers.launcher(self._launcher).Restart(request, timeout=LAUNCHER_SECONDS)
            logger.info("asked the launcher to restart %s: %s", order.instance, answer.detail)
        except grpc.aio.AioRpcError as error:
            self.failures[order.instance] = f"the launcher at {self._launcher} can't restart it: {explain(error)}"
            logger.warning("%s: %s", order.instance, self.failures[order.instance])
            return error.code() != grpc.StatusCode.NOT_FOUND
        return True

    async def _frozen(self, order: RestartOrder) -> bool:
        """Return True if a replica's process runs but doesn't answer."""
        for _ in range(PROBES):
            try:
                await self._peers.replica(order.address).GetStatus(GetStatusRequest(), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    return False  # it is gone, and its supervisor knows
                continue
            self.failures[order.instance] = "it answers calls, but sends no heartbeats"
            return False
        logger.warning("%s runs, but doesn't answer", order.replica_id)
        return True

    async def _request(self, order: RestartOrder) -> bool:
        """Ask a replica's process to end. Return True if it will end or was already replaced."""
        request = RestartRequest(replica_id=order.replica_id, reason=order.reason)
        try:
            await self._peers.replica(order.address).Restart(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.info("%s doesn't answer: %s", order.replica_id, explain(error))
            return error.code() == grpc.StatusCode.FAILED_PRECONDITION
        return True


TICK_SECONDS = 0.5
LEVELS = {Health.HEALTHY: logging.INFO, Health.FAILED: logging.ERROR}


class PausableRun(Protocol):
    """The part of a run that the health manager needs."""

    record: RunRecord

    async def pause(self, reason: str) -> None:
        """Pause the run: stop publishing prompts."""

    async def resume(self) -> None:
        """Resume the paused run."""


class HealthManager:
    """Restarts unhealthy replicas of one run, and pauses the run while a role is rebuilt. Lives in the event loop."""

    def __init__(
        self, run: PausableRun, context: RunContext, sync: WeightSync, handoff: GpuHandoff | None = None
    ) -> None:
        """`handoff` is the GPU handoff of a colocated run; None in other runs."""
        self._run = run
        self._context = context
        self._restarter = Restarter(context.peers, context.launcher)
        signs = HealthSignals(
            context.config,
            context.registry.heartbeat_seconds,
            sync_failures=sync.failures,
            sync_refusal=sync.refusal,
            sync_error=lambda: sync.last_failure,
            handoff_failure=handoff.failure if handoff is not None else None,
        )
        self._policy = HealthPolicy(
            context.run_id,
            context.config,
            signs,
            roles=context.fleet.roles,
            restart_failures=self._restarter.failures,
            idle_reason=context.fleet.idle_reason,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown: set[str] = set()
        """Instances of replicas that the launcher no longer knows, because they were removed."""
        self._paused_for: set[str] = set()
        """Reasons of the pauses that this manager started. If a user ends such a pause, it isn't started again."""
        self._to_reclaim: list[str] = []
        """Ids of lost processes whose groups still have to be reclaimed."""
        self.record = HealthRecord()

    @property
    def failure(self) -> RoleFailure | None:
        """Failure of a role because of which the run can't continue; None if there is none."""
        return self._policy.failure

    @property
    def rebuilding(self) -> bool:
        """True while a role is being rebuilt; the run's pause ends once the role is back."""
        return any(role.state == Health.REBUILDING for role in self.record.roles.values())

    async def run_forever(self) -> None:
        """Check the replicas' health and act on problems every TICK_SECONDS. Raises Superseded, Fenced."""
        loaded = False
        last = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    if not loaded:
                        self.record = await self._context.store.health(self._context.run_id)
                        self._context.fleet.give_up(self.record.given_up)
                        loaded = True
                        self._reset_timers()
                    await self._tick()
                except (BoardUnavailable, StoreUnavailable) as error:
                    logger.info("health of run %s: waiting for Redis: %s", self._context.run_id, error)
                    self._reset_timers()
                now = asyncio.get_running_loop().time()
                if (
                    now - last > self._context.registry.lease_seconds / 2
                ):  # this process was suspended and received no heartbeats
                    self._reset_timers()
                last = now
                await asyncio.sleep(TICK_SECONDS)  # idle: looks again
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reset_timers(self) -> None:
        """Restart all timers: replicas are not to blame for an outage of this coordinator or of Redis."""
        self.record = self.record.with_reset_timers(steady_time())
        self._policy.reset_timers()

    async def _tick(self) -> None:
        phase = self._run.record.phase
        if phase not in (Phase.PENDING, Phase.RUNNING) or self._run.record.stop_reason:
            return
        last_step = await self._context.board.last_step()  # also raises if Redis is away
        draft = HealthUpdate(self.record, steady_time())
        for instance in self._unknown & set(draft.replicas):
            del draft.replicas[instance]
        self._unknown.clear()
        roles = RoleSigns(self._context.fleet.missing(), last_step) if phase == Phase.RUNNING else None
        self._policy.update(draft, self._context.registry.all(), roles)
        if (changed := draft.result()) != self.record:
            await self._context.store.save_health(self._context.run_id, changed)
            self.record = changed
            self._context.fleet.give_up(changed.given_up)
            self._context.registry.changed.fire()
        self._to_reclaim += draft.lost_ids
        self._report(draft)
        for order in draft.restarts:
            self._start(self._restart(order))
        await self._follow_rebuilds(draft)
        while self._to_reclaim:
            freed = await self._context.board.reclaim(term=self._context.store.term, consumer=self._to_reclaim[-1])
            if freed:
                logger.warning("%d groups held by %s are reclaimed", freed, self._to_reclaim[-1])
            self._to_reclaim.pop()

    def _report(self, draft: HealthUpdate) -> None:
        """Log the health decisions and record their metrics."""
        for event in draft.new_events:
            level = LEVELS.get(event.state, logging.WARNING)
            logger.log(level, "health of %s: %s", event.instance or event.role, event.text)
            if not event.instance and event.state == Health.REBUILDING:
                labels = {"relaxd.run_id": self._context.run_id, "relaxd.role": event.role}
                telemetry.record("health.rebuilds", 1, labels)
        for order in draft.restarts:
            labels = {"relaxd.run_id": self._context.run_id, "relaxd.role": order.role}
            telemetry.record("health.restarts", 1, labels)
        for role in draft.roles:
            unwell = sum(one.state != Health.HEALTHY for one in draft.replicas.values() if one.role == role)
            labels = {"relaxd.run_id": self._context.run_id, "relaxd.role": role}
            telemetry.record("health.unwell", unwell, labels)

    async def _restart(self, order: RestartOrder) -> None:
        if not await self._restarter.restart(order):
            self._unknown.add(order.instance)

    async def _follow_rebuilds(self, draft: HealthUpdate) -> None:
        """Pause the run while a role is rebuilt, then resume it, even if an earlier coordinator paused it."""
        paused = self._run.record.paused
        rebuilding = [role for role in draft.roles.values() if role.state == Health.REBUILDING]
        began = {event.role for event in draft.new_events if event.state == Health.REBUILDING}
        if rebuilding and paused is None and rebuilding[0].pause not in self._paused_for:
            self._paused_for.update(role.pause for role in rebuilding)
            await self._run.pause(rebuilding[0].pause)
        elif not rebuilding and paused is not None and paused in {role.pause for role in draft.roles.values()}:
            await self._run.resume()
            logger.info("run %s is resumed: all roles are back", self._context.run_id)
        if began and not any(ROLES[role.role].weights == "sends" for role in rebuilding):
            self._start(self._checkpoint())

    async def _checkpoint(self) -> None:
        """Save a checkpoint if a trainer is ready: the run may fail next."""
        if self._context.fleet.trainer() is None:
            return
        try:
            saved = await save_checkpoint(self._context, rotate=True)
            logger.info("checkpoint of version %d saved: %s", saved.weights.version, saved.path)
        except RpcError as error:
            logger.warning("could not save a checkpoint: %s", error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
