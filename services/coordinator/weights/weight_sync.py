"""Bringing the trainer's weights to the engines: one synchronisation at a time, none of which can hang.

The sequence is: where the membership changed, leave the old weight group and connect a new one, while the engines go on
generating; then the trainer broadcasts, while each engine pauses, receives and resumes. When a member dies or is late,
everybody leaves the group (which aborts what they are in), the engines to blame are set aside for a while, and the next
attempt goes on without them.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from relaxd import telemetry
from relaxd.config import WeightsConfig
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Replica
from services.coordinator.state.records import Announcement, GroupRecord, Member, WeightsRecord
from services.coordinator.state.store import Store, StoreUnavailable
from services.coordinator.weights.weight_calls import SyncFailed, WeightCalls

logger = logging.getLogger(__name__)

SET_ASIDE_SECONDS = 5.0
"""How long an engine is left out after its first failure; doubles with each further one."""
MAX_SET_ASIDE_SECONDS = 60.0
IDLE_SECONDS = 0.5
MAX_RETRY_SECONDS = 2.0


class WeightSync:
    """Drives the synchronisations of one run."""

    def __init__(self, store: Store, record: WeightsRecord, fleet: Fleet, peers: Peers, config: WeightsConfig) -> None:
        self._store = store
        self._fleet = fleet
        self._registry = fleet.registry
        self._config = config
        self._calls = WeightCalls(fleet.registry, peers, config)
        self._saving = asyncio.Lock()
        self._blame: dict[Member, tuple[int, float]] = {}
        """Failures in a row of an engine, and until when it is left out."""
        self._refusals: Counter[Member] = Counter()
        """Failures since the last success in which a member answered with an error and nobody was to blame."""
        self._verified: set[tuple[Member, Member]] = set()
        """Trainers and engines whose weights were compared."""
        self.record = record
        self.last_failure = ""
        """Why the last attempt failed, for people; empty after a success."""
        self.seconds = 0.0
        """Spent on synchronisations so far, those that failed included."""

    @property
    def announced(self) -> Announcement | None:
        """The newest version that this run's trainer announced."""
        announced = self.record.announced
        return announced if announced is not None and announced.run_id == self._fleet.run_id else None

    async def announce(self, announcement: Announcement) -> None:
        """Remember a new version; the synchronisation follows by itself."""
        await self._save(announced=announcement)
        self._registry.changed.fire()

    def up_to_date(self) -> bool:
        """Whether every engine that is not set aside, and at least one, serves the announced version."""
        announced = self.announced
        engines = [engine for engine in self._fleet.engines() if engine.replica_id not in self._fleet.set_aside]
        if announced is None or not engines:
            return False
        return all(engine.version == (announced.term, announced.version) for engine in engines)

    def failures(self, replica: Replica) -> int:
        """Synchronisations in a row that failed because of a replica, as far as one can tell."""
        return self._blame.get(replica.member, (0, 0.0))[0] + self._refusals[replica.member]

    def involves(self, replica_id: str) -> bool:
        """Whether a synchronisation runs that would break if this engine went now."""
        group = self.record.group
        return self.record.running and (group is None or any(e.replica_id == replica_id for e in group.engines))

    async def run_forever(self) -> None:
        """Synchronise whenever an engine doesn't serve what is announced."""
        delay = 0.0
        while True:
            self._fleet.set_aside = self._set_aside()
            trainer, announced = self._fleet.trainer(), self.announced
            engines = [engine for engine in self._fleet.engines() if engine.replica_id not in self._fleet.set_aside]
            # What an earlier trainer announced can't be fetched any more: its successor announces when it has replayed.
            able = trainer is not None and announced is not None and announced.replica_id == trainer.replica_id
            # One that an earlier coordinator left in the middle may have left engines paused, up to date or not.
            done = self.up_to_date() and not self.record.running
            if not able or done or not engines:
                await self._registry.changed.wait(IDLE_SECONDS)
            else:
                assert trainer is not None  # `able` says so, but not to mypy
                assert announced is not None
                delay = await self._attempt(trainer.member, [engine.member for engine in engines], announced, delay)
                await asyncio.sleep(delay)

    def candidates(self) -> list[Replica]:
        """The engines that may receive weights now."""
        self._fleet.set_aside = self._set_aside()
        return [engine for engine in self._fleet.engines() if engine.replica_id not in self._fleet.set_aside]

    async def synchronise(
        self, trainer: Member, engines: list[Member], announced: Announcement, then: Callable[[], Awaitable[None]]
    ) -> bool:
        """Synchronise once, in the place of `run_forever`, through a group that is left again; returns whether it went
        well, else `last_failure` says why.

        `then` is awaited when the weights are there, before the engines count as serving them; it may raise what it
        likes.
        """
        await self._attempt(trainer, engines, announced, 0.0, then)
        return not self.last_failure

    async def _attempt(
        self,
        trainer: Member,
        engines: list[Member],
        announced: Announcement,
        delay: float,
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> float:
        """Synchronise once; returns how long to wait before the next attempt."""
        blamed: frozenset[Member] = frozenset()
        started = time.monotonic()
        try:
            if self.record.running:
                await self._abort_recorded()
            await self._synchronise(trainer, engines, announced, then)
            self.last_failure = ""
            self._refusals.clear()
            return 0.0
        except SyncFailed as error:
            self.last_failure, blamed = str(error), error.blamed
            if not blamed:  # a trainer says that it is the engines' fault, too
                self._refusals.update(error.refused - {trainer} or error.refused)
        except StoreUnavailable as error:
            self.last_failure = str(error)
        finally:
            self.seconds += time.monotonic() - started
        telemetry.record("sync.failures", 1, {"relaxd.run_id": self._fleet.run_id})
        logger.warning("weight synchronisation %d failed: %s", self.record.last_sync_id, self.last_failure)
        self._blame_for(blamed)
        # Without those to blame the next attempt is another one, so it can begin at once.
        return 0.0 if blamed else min(MAX_RETRY_SECONDS, 2 * delay + 0.1)

    async def _synchronise(
        self,
        trainer: Member,
        engines: list[Member],
        announced: Announcement,
        then: Callable[[], Awaitable[None]] | None,
    ) -> None:
        started = time.monotonic()
        sync_id, version = self.next_id(), (announced.term, announced.version)
        # Engines may pause meanwhile, which ends by itself; more than that happens only once it is on record.
        recording = asyncio.create_task(self._save(last_sync_id=sync_id, running=True))
        attributes = {"relaxd.sync_id": sync_id, "relaxd.version": announced.version, "relaxd.engines": len(engines)}
        with telemetry.root_span("sync_weights", attributes=attributes):
            try:
                group = self.record.group
                if group is None or group.trainer != trainer or group.engines != tuple(engines):
                    await recording
                    group = await self._connected(sync_id, trainer, engines)
                connected = time.monotonic() - started
                unverified = self._unverified(trainer, engines)
                receiving = await self._calls.transfer(sync_id, group, version, unverified, recording)
                if then is not None:  # what the group holds of the devices is given back
                    await self._calls.leave(sync_id, group)
                    await self._save(group=None)
            except StoreUnavailable:
                await self._calls.abort(sync_id, self.record.group, engines)
                raise
            except SyncFailed as error:
                with contextlib.suppress(StoreUnavailable):  # that is found out below
                    await recording
                if error.wrong:
                    logger.error("%s: they serve nothing and get them again", error)
                silent = await self._calls.abort(sync_id, self.record.group, engines, error.wrong, error.silent)
                await self._save(running=False, group=None)
                blamed = error.blamed | silent
                if trainer in silent or (len(engines) > 1 and blamed.issuperset(engines)):
                    blamed = frozenset()  # the trainer is gone, or everybody at once: no engine is to blame
                raise SyncFailed(str(error), blamed, refused=error.refused) from error
        seconds = time.monotonic() - started
        if then is not None:
            await then()
        for engine in engines:
            self._blame.pop(engine, None)
            self._registry.mark_synced(engine, version)
            self._verified.add((trainer, engine))
        await self._save(running=False, last_sync_seconds=seconds)
        telemetry.record("sync.seconds", seconds, {"relaxd.run_id": self._fleet.run_id})
        logger.info(
            "version %d is on %d engines after %.4f s (connecting %.4f s, receiving %.4f s)",
            *(announced.version, len(engines), seconds, connected, receiving),
        )

    def _unverified(self, trainer: Member, engines: Sequence[Member]) -> list[Member]:
        """Whose weights are to be compared with the trainer's this time."""
        match self._config.verify:
            case "always":
                return list(engines)
            case "never":
                return []
        self._verified = {pair for pair in self._verified if pair[0] == trainer}
        return [engine for engine in engines if (trainer, engine) not in self._verified]

    async def _connected(self, sync_id: int, trainer: Member, engines: list[Member]) -> GroupRecord:
        """A new weight group of these members, in the place of the one that is."""
        old = self.record.group
        if old is not None:
            await self._calls.leave(sync_id, old)
        manifest = await self._calls.manifest(trainer)
        name = f"{self._fleet.run_id}-{self._store.term}-{sync_id}"
        group = GroupRecord(name=name, trainer=trainer, engines=tuple(engines))
        await self._save(group=group)
        await self._calls.join(sync_id, group, manifest)
        return group

    async def _abort_recorded(self) -> None:
        """End what an earlier coordinator, or one without Redis, was in the middle of."""
        group = self.record.group
        logger.info("aborting synchronisation %d, which did not end", self.record.last_sync_id)
        await self._save(last_sync_id=self.next_id())
        engines = [engine.member for engine in self._fleet.engines()]
        await self._calls.abort(self.record.last_sync_id, group, engines)
        await self._save(running=False, group=None)

    def next_id(self) -> int:
        """Ids are Unix milliseconds, so that they ascend for the members even where Redis has lost the last one."""
        return max(self.record.last_sync_id + 1, int(time.time() * 1000))

    async def close(self) -> None:
        """Leave the weight group: the run is over."""
        group = self.record.group
        if group is not None:
            await self._calls.abort(self.record.last_sync_id, group, group.engines)
            await self._save(group=None)

    def _set_aside(self) -> frozenset[str]:
        now = time.monotonic()
        return frozenset(member.replica_id for member, (_, until) in self._blame.items() if until > now)

    def _blame_for(self, members: Iterable[Member]) -> None:
        for member in members:
            failures = self._blame.get(member, (0, 0.0))[0] + 1
            seconds = min(SET_ASIDE_SECONDS * 2 ** (failures - 1), MAX_SET_ASIDE_SECONDS)
            self._blame[member] = (failures, time.monotonic() + seconds)
            logger.warning("%s is left out of weight synchronisation for %.0f s", member.replica_id, seconds)
        self._blame = {member: value for member, value in self._blame.items() if self._registry.holds(member)}

    async def _save(self, **changes: Any) -> None:
        """Change the record, in Redis first."""
        async with self._saving:  # an announcement may come in at any time
            record = self.record.model_copy(update=changes)
            await asyncio.to_thread(self._store.save_weights, record)
            self.record = record
