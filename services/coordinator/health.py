"""The health manager of a run: notices replicas that are dead or stuck, and brings them back, or gives the run up.

Every half second it compares what the registry has with its record, which is in Redis: what it decides is saved there
first, under the coordinator's epoch, and then done. So another coordinator goes on where this one ended.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import grpc

from relaxd import telemetry
from relaxd.board import Board, BoardUnavailable
from relaxd.config import RunConfig
from relaxd.rpc.errors import explain
from relaxd.v1.trainer_pb2 import TrainerSaveCheckpointRequest
from services.coordinator.fleet import NEEDED, Fleet
from services.coordinator.health_ask import Asker
from services.coordinator.health_draft import Ask, Draft
from services.coordinator.health_records import Health, HealthRecord
from services.coordinator.health_replicas import FirstTier
from services.coordinator.health_roles import RoleSigns, SecondTier
from services.coordinator.health_signs import Signs
from services.coordinator.patience import LONG_CALL_SECONDS, NoAnswer, answer
from services.coordinator.peers import Peers
from services.coordinator.records import Phase, RunRecord
from services.coordinator.registry import Registry, Replica
from services.coordinator.store import Store, StoreUnavailable
from services.coordinator.weight_sync import WeightSync

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
LEVELS = {Health.HEALTHY: logging.INFO, Health.FAILED: logging.ERROR}


class Run(Protocol):
    """The run, as far as its health concerns it."""

    record: RunRecord

    async def pause(self, reason: str) -> None:
        """Publish nothing more."""

    async def resume(self) -> None:
        """End a pause."""


class HealthManager:
    """Looks after one run. Lives in the event loop."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        board: Board,
        fleet: Fleet,
        sync: WeightSync,
        store: Store,
        registry: Registry,
        peers: Peers,
        launcher: str,
    ) -> None:
        self._run = run
        self._run_id = run.record.run_id
        self._config = config
        self._board = board
        self._fleet = fleet
        self._store = store
        self._registry = registry
        self._peers = peers
        self._signs = Signs(config, registry.heartbeat_seconds, sync.failures)
        self._asker = Asker(peers, launcher, store.epoch)
        self._replicas = FirstTier(self._run_id, config.health, self._signs, self._asker.troubles)
        self._roles = SecondTier(config.health)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown: set[str] = set()
        """Instances that the launcher doesn't know: they were removed."""
        self._paused_for: set[str] = set()
        """The pauses that were begun here: a person may end them earlier."""
        self._to_free: list[str] = []
        """Processes that are gone and whose groups are not free yet."""
        self.record = HealthRecord()

    @property
    def failure(self) -> str:
        """Why the run can't go on; empty as long as it can."""
        return self._roles.failure

    async def run_forever(self) -> None:
        """Look, and act. Raises Superseded, Fenced."""
        loaded = False
        last = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    if not loaded:
                        self.record = await asyncio.to_thread(self._store.health, self._run_id)
                        loaded = True
                        self._forgive()
                    await self._tick()
                except (BoardUnavailable, StoreUnavailable) as error:
                    logger.info("health of run %s: waiting for Redis: %s", self._run_id, error)
                    self._forgive()
                now = asyncio.get_running_loop().time()
                if now - last > self._registry.lease_seconds / 2:  # this process stood still, and heard nobody
                    self._forgive()
                last = now
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forgive(self) -> None:
        """Nobody can be blamed for the time in which this coordinator, or Redis, was not there."""
        self.record = self.record.waiting_anew(time.time())
        self._signs.forgive()
        self._roles.forgive()

    async def _tick(self) -> None:
        phase = self._run.record.phase
        if phase not in (Phase.PENDING, Phase.RUNNING) or self._run.record.stop_reason:
            return
        last_step = await asyncio.to_thread(self._board.last_step)  # also tells whether Redis is there
        live = self._live()
        draft = Draft(self.record)
        for instance in self._unknown & set(draft.replicas):
            del draft.replicas[instance]
        self._unknown.clear()
        self._replicas.look(draft, live)
        if phase == Phase.RUNNING:
            signs = RoleSigns(self._fleet.missing(), last_step)
            for name, role in NEEDED.items():
                of_role = {key: one for key, one in live.items() if one.registration.role == role}
                self._roles.look(draft, name.upper(), of_role, signs)
        if (changed := draft.result()) != self.record:
            await asyncio.to_thread(self._store.save_health, self._run_id, changed)
            self.record = changed
            self._registry.changed.fire()
        self._to_free += draft.gone
        self._tell(draft)
        for ask in draft.asks:
            self._go(self._ask(ask))
        await self._follow_rebuilds(draft)
        while self._to_free:
            freed = await asyncio.to_thread(self._board.reclaim, epoch=self._store.epoch, consumer=self._to_free[-1])
            if freed:
                logger.warning("%d groups that %s held are free again", freed, self._to_free[-1])
            self._to_free.pop()

    def _live(self) -> dict[str, Replica]:
        """The newest registered replica of each instance, of the roles that a run needs."""
        replicas = (one for one in self._registry.all() if one.registration.role in NEEDED.values())
        return {one.instance: one for one in sorted(replicas, key=lambda one: one.registered_at)}

    def _tell(self, draft: Draft) -> None:
        """Tell people what was decided."""
        for event in draft.new_events:
            level = LEVELS.get(event.state, logging.WARNING)
            logger.log(level, "health of %s: %s", event.instance or event.role.lower(), event.text)
            if not event.instance and event.state == Health.REBUILDING:
                labels = {"relaxd.run_id": self._run_id, "relaxd.role": event.role.lower()}
                telemetry.record("health.rebuilds", 1, labels)
        for ask in draft.asks:
            labels = {"relaxd.run_id": self._run_id, "relaxd.role": ask.role.lower()}
            telemetry.record("health.restarts", 1, labels)
        for role in draft.roles:
            unwell = sum(one.state != Health.HEALTHY for one in draft.replicas.values() if one.role == role)
            labels = {"relaxd.run_id": self._run_id, "relaxd.role": role.lower()}
            telemetry.record("health.unwell", unwell, labels)

    async def _ask(self, ask: Ask) -> None:
        if not await self._asker.ask(ask):
            self._unknown.add(ask.instance)

    async def _follow_rebuilds(self, draft: Draft) -> None:
        """Pause the run while a role is rebuilt, and end that pause, whichever coordinator began it."""
        paused = self._run.record.paused
        rebuilding = [role for role in draft.roles.values() if role.state == Health.REBUILDING]
        began = {event.role for event in draft.new_events if event.state == Health.REBUILDING}
        if rebuilding and paused is None and rebuilding[0].pause not in self._paused_for:
            self._paused_for.update(role.pause for role in rebuilding)
            await self._run.pause(rebuilding[0].pause)
        elif not rebuilding and paused is not None and paused in {role.pause for role in draft.roles.values()}:
            await self._run.resume()
            logger.info("run %s goes on", self._run_id)
        if began and "TRAINER" not in {role.role for role in rebuilding}:
            self._go(self._checkpoint())

    async def _checkpoint(self) -> None:
        """Take a checkpoint, if the trainer is well: the newest one is kept in any case."""
        trainer = self._fleet.trainer()
        if trainer is None:
            return
        try:
            stub = self._peers.trainer(trainer.registration.address)
            call = stub.SaveCheckpoint(TrainerSaveCheckpointRequest(), timeout=LONG_CALL_SECONDS)
            saved = await answer(call, trainer, self._registry)
            logger.info("checkpoint of version %d before going on: %s", saved.weights.version, saved.path)
        except (grpc.aio.AioRpcError, NoAnswer) as error:
            why = explain(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.warning("no checkpoint could be taken: %s", why)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
