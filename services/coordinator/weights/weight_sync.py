"""Weight synchronisation from the trainer to the engines: one at a time, each with deadlines.

`JoinBatcher` decides which engines join the next synchronisation, `ExcludedEngines` which engines are left out after
failures, and `is_due` when it is due.

If the membership changed, the members leave the old weight group and connect a new one while the engines keep
generating. Then the trainer broadcasts, while each engine pauses, receives and resumes. When a member dies or is late,
all members leave the group, which aborts their collectives; the engines to blame are excluded for a while, and the next
attempt runs without them. An engine that rejects the trainer's tensors as invalid gets no further attempt from this
trainer.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from relaxd import telemetry
from relaxd.board import BoardUnavailable
from relaxd.roles import ROLLOUT
from relaxd.rpc.errors import FailedPrecondition
from relaxd.waiting import Backoff, steady_time
from services.coordinator.fleet.registry import Replica, Version
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.state.records import Announcement, GroupRecord, Member, RoleFailure, WeightsRecord
from services.coordinator.state.store import StoreUnavailable
from services.coordinator.weights.weight_group_client import SyncFailed, WeightGroupClient

QUIET_SHARE = 0.5
"""Time without new arrivals after which waiting engines join the weight group, as a multiple of the seconds to connect
a group."""
MOST_SHARE = 4.0
"""Maximum time that an engine waits before it joins the weight group, as a multiple of the seconds to connect a
group."""


class JoinBatcher:
    """Lets engines that arrive one after the other join the weight group together.

    Every change of membership reconnects all members, so 500 engines arriving within a minute could cause hundreds of
    reconnections. New engines therefore wait, in proportion to the time that connecting takes; in a small fleet they
    hardly wait. If the group must be reconnected anyway, all of them join at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Member, float] = {}
        """Clock time at which each engine was first seen."""
        self.connect_seconds = 0.0
        """Seconds that connecting the last weight group took."""
        self.due_seconds = float("inf")
        """Seconds until the engines that `admit` left out may join; infinity if it left none out."""

    def admit(self, trainer: Member, engines: Sequence[Member], group: GroupRecord | None) -> list[Member]:
        """Return the engines to synchronise now: all, or only members of the connected group while new ones wait to
        join."""
        now = self._clock()
        self._seen = {engine: self._seen.get(engine, now) for engine in engines}
        self.due_seconds = float("inf")
        if group is None or group.trainer != trainer:
            return list(engines)
        members = set(group.engines)
        waiting = [seen for engine, seen in self._seen.items() if engine not in members]
        if not waiting or not members <= self._seen.keys():
            return list(engines)
        quiet = max(waiting) + QUIET_SHARE * self.connect_seconds - now
        most = min(waiting) + MOST_SHARE * self.connect_seconds - now
        if min(quiet, most) <= 0:
            return list(engines)
        self.due_seconds = min(quiet, most)
        return [engine for engine in engines if engine in members]


EXCLUSION = Backoff(first_seconds=5.0, max_seconds=60.0)
"""Duration of an engine's exclusion, in seconds; it grows with the engine's consecutive failures."""


class ExcludedEngines:
    """Counts the failures of engines, and excludes those to blame from synchronisation for some time."""

    def __init__(self) -> None:
        self._blame: dict[Member, tuple[int, float]] = {}
        """Number of consecutive failures of each engine, and the monotonic time until which the engine is excluded."""
        self.refusals: Counter[Member] = Counter()
        """By engine: number of failures since the last success in which this engine answered with an error and no
        member was blamed. They don't exclude the engine."""

    def members(self) -> list[Member]:
        """Return the engines that are excluded now."""
        now = time.monotonic()
        return [member for member, (_, until) in self._blame.items() if until > now]

    def failures(self, member: Member) -> int:
        """Return the number of consecutive synchronisations whose failure this member probably caused."""
        return self._blame.get(member, (0, 0.0))[0] + self.refusals[member]

    def blame(self, members: Iterable[Member], known: Callable[[Member], bool]) -> None:
        """Exclude members from synchronisation, for longer after each failure. Forget members for which `known` returns
        False."""
        for member in members:
            failures = self._blame.get(member, (0, 0.0))[0] + 1
            seconds = EXCLUSION.pause(failures)
            self._blame[member] = (failures, time.monotonic() + seconds)
            logger.warning("%s is excluded from weight synchronisation for %.0f s", member.replica_id, seconds)
        self._blame = {member: value for member, value in self._blame.items() if known(member)}

    def forgive(self, member: Member) -> None:
        """Forget the failures of a member that has taken part in a synchronisation."""
        self._blame.pop(member, None)


def is_due(announced: Version, served: Sequence[Version | None], *, interval: int, last: int) -> bool:
    """Return True if the engines should get the announced weights now.

    Weights are due every `interval` versions after the oldest version that an engine serves. They are due at once if an
    engine serves no version of this term: it has joined, was quarantined, or another trainer has taken over. The gate
    admits prompts for max_staleness + 1 >= interval steps after that oldest version, so the steps until the next
    synchronisation can always be filled.

    Args:
        announced: the trainer's newest weights.
        served: version that each engine serves; None: it serves none.
        interval: weights.interval.
        last: version of the run's last step, which is always sent.
    """
    term, version = announced
    if any(one is None or one[0] != term for one in served):
        return True
    behind = version - min((one[1] for one in served if one is not None), default=version)
    return behind >= interval or (behind > 0 and version >= last)


logger = logging.getLogger(__name__)

OTHERS_SECONDS = 0.003
"""Delay, in seconds, after which other tasks are notified of a new version, so that a synchronisation can send its
calls first."""
IDLE_SECONDS = 0.5
BACKOFF = Backoff(first_seconds=0.1, max_seconds=2.0)
QUIET_FAILURES = 4
"""Maximum number of consecutive failed attempts that aren't reported as failures while the trainer already has newer
weights."""


class WeightSync:
    """Runs the weight synchronisations of one run."""

    def __init__(self, context: RunContext, record: WeightsRecord) -> None:
        self._context = context
        self._fleet = context.fleet
        self._registry = context.registry
        self._news = context.registry.changed.follow()
        """Signal that `run_forever` waits for: fires shortly after a change in the registry, and at once for a new
        version."""
        self._client = WeightGroupClient(context.registry, context.peers, context.config.weights)
        self._saving = asyncio.Lock()
        self._recorded_ahead = False
        """True if Redis already records that a synchronisation may be in progress."""
        self._excluded = ExcludedEngines()
        self._joins = JoinBatcher()
        self._waiting_for_newest = 0
        """Number of callers inside `without_interval`; while there are any, weights.interval is ignored."""
        self._unfit: dict[tuple[Member, Member], str] = {}
        """Error of each engine that answered INVALID_ARGUMENT, by trainer and engine. Such a pair is not tried
        again."""
        self._verified: set[tuple[Member, Member]] = set()
        """Pairs of trainer and engine whose weights were compared and had equal checksums."""
        self._wrong: dict[Member, str] = {}
        """By engine: description of its checksums' differences, until the engine is synchronised again."""
        self.record = record
        self.last_failure = ""
        """Why the last synchronisation attempt failed; empty after a success."""
        self.waiting_for = ""
        """Reason why engines wait for weights that can't be sent now; empty while none does."""
        self.began: float | None = None
        """Unix time at which the first attempt of the current synchronisation began; None if no synchronisation is
        needed."""
        self._failures_in_a_row = 0
        """Number of consecutive failed attempts for which no engine was to blame."""
        self.totals: dict[str, float] = {}
        """Seconds and bytes of all synchronisations so far, by metric; `sync_seconds` includes failed ones."""

    @property
    def announced(self) -> Announcement | None:
        """Newest version that this run's trainer announced; None before the first."""
        announced = self.record.announced
        return announced if announced is not None and announced.run_id == self._context.run_id else None

    async def announce(self, announcement: Announcement) -> None:
        """Record a new version, which `run_forever` synchronises. Raises FailedPrecondition if a newer version is
        already announced."""
        before = self.announced
        if before is not None and (announcement.term, announcement.version) < (before.term, before.version):
            raise FailedPrecondition(
                f"version {announcement.version} of term {announcement.term} is older than the announced version "
                f"{before.version} of term {before.term}"
            )
        await self._save(announced=announcement, ahead=self._is_due(announcement, self._fleet.candidates()))
        self._news.wake()
        asyncio.get_running_loop().call_later(OTHERS_SECONDS, self._registry.changed.fire)

    def up_to_date(self) -> bool:
        """Return True if all engines that aren't excluded have the announced version, and there is at least one."""
        announced = self.announced
        engines = self._fleet.candidates()
        if announced is None or not engines:
            return False
        return all(engine.version == (announced.term, announced.version) for engine in engines)

    @contextlib.contextmanager
    def without_interval(self) -> Iterator[None]:
        """Inside the context, send every new version at once instead of waiting for weights.interval."""
        self._waiting_for_newest += 1
        self._news.wake()
        try:
            yield
        finally:
            self._waiting_for_newest -= 1

    def _is_due(self, announced: Announcement, engines: Sequence[Replica]) -> bool:
        """Return True if these engines should get the announced version now."""
        config, served = self._context.config, [engine.version for engine in engines]
        interval = 1 if self._waiting_for_newest else config.weights.interval
        return is_due((announced.term, announced.version), served, interval=interval, last=config.run.steps)

    def failures(self, replica: Replica) -> int:
        """Return the number of consecutive synchronisations whose failure this replica probably caused."""
        return self._excluded.failures(replica.member)

    def refusal(self, replica: Replica) -> str:
        """Return the reason why an engine permanently refuses this trainer's weights; "" if it doesn't."""
        trainer = self._fleet.trainer()
        return self._unfit.get((trainer.member, replica.member), "") if trainer is not None else ""

    def wrong_engines(self) -> dict[str, str]:
        """Return a description of the differences for each engine whose weights aren't those sent, by replica id."""
        self._wrong = {member: text for member, text in self._wrong.items() if self._registry.holds(member)}
        return {member.replica_id: text for member, text in self._wrong.items()}

    def failure(self) -> RoleFailure | None:
        """Return why the rollout role has failed; None if it hasn't.

        The role has failed if an engine refuses this trainer's weights and all others refuse them, too, or were given
        up.
        """
        engines = self._fleet.of_role(ROLLOUT)
        refusing = [one for one in engines if self.refusal(one)]
        left = [one for one in engines if one not in refusing and one.instance not in self._fleet.given_up]
        if not refusing or left:
            return None
        first = refusing[0]
        text = f"no engine takes the trainer's weights: {first.replica_id} refuses them: {self.refusal(first)}"
        return RoleFailure(ROLLOUT, first.instance, text)

    def involves(self, replica_id: str) -> bool:
        """Return True if a synchronisation is running in which this engine takes part, or may take part."""
        group = self.record.group
        return self.record.running and (group is None or any(e.replica_id == replica_id for e in group.engines))

    async def run_forever(self) -> None:
        """Send the announced version to the engines whenever it is due, until cancelled."""
        while True:
            engines = self.candidates()
            trainer, announced = self._fleet.trainer(), self.announced
            admitted = [engine.member for engine in engines]
            if trainer is not None:
                admitted = self._joins.admit(trainer.member, admitted, self.record.group)
            members = set(admitted)
            receivers = [engine for engine in engines if engine.member in members]
            # A lost trainer's version can't be fetched any more; its successor announces it again after its replay.
            able = trainer is not None and announced is not None and announced.replica_id == trainer.replica_id
            # An interrupted synchronisation may have left engines paused even if they are up to date.
            done = announced is not None and not self._is_due(announced, receivers) and not self.record.running
            self.waiting_for = ""
            if trainer is not None and announced is not None and able and not done:
                self.waiting_for = waits_for_updates(trainer, announced, engines)
            if not able or done or not engines or self.waiting_for:
                self.began = (self.began or time.time()) if self.waiting_for else None
                # Without a trainer `admit` isn't called, so `due_seconds` may be outdated.
                pause = IDLE_SECONDS if trainer is None else min(IDLE_SECONDS, self._joins.due_seconds)
                await self._news.wait(pause)  # named: Run.waiting_for has `waiting_for`
            else:
                assert trainer is not None  # `able` says so, but not to mypy
                assert announced is not None
                await asyncio.sleep(
                    await self._attempt(trainer.member, admitted, announced)
                )  # idle: `last_failure` says why

    def candidates(self) -> list[Replica]:
        """Return the engines that may receive weights now: not excluded, and not refusing this trainer's weights."""
        refusing = [engine.replica_id for engine in self._fleet.engines() if self.refusal(engine)]
        self._fleet.exclude([*refusing, *(member.replica_id for member in self._excluded.members())])
        return self._fleet.candidates()

    async def synchronise(
        self, trainer: Member, engines: list[Member], announced: Announcement, then: Callable[[], Awaitable[None]]
    ) -> bool:
        """Send the announced version to the engines once, for callers that don't use `run_forever`, and leave the
        weight group. Returns False on failure.

        `then` is awaited after the transfer, before the engines count as serving; its errors are passed on.
        """
        await self._attempt(trainer, engines, announced, then)
        return not self.last_failure

    async def _attempt(
        self,
        trainer: Member,
        engines: list[Member],
        announced: Announcement,
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> float:
        """Make one attempt to send the announced version. Returns the seconds until the next attempt."""
        blamed: frozenset[Member] = frozenset()
        unfit: dict[tuple[Member, Member], str] = {}
        started = time.monotonic()
        self.began = self.began or time.time()
        try:
            if self.record.running:
                await self._abort_recorded()
            await self._synchronise(trainer, engines, announced, then)
            self.last_failure, self.began, self._failures_in_a_row = "", None, 0
            self._excluded.refusals.clear()
            return 0.0
        except SyncFailed as error:
            self.last_failure, blamed = str(error), error.blamed
            if error.changed and not blamed and not error.unfit and self._failures_in_a_row < QUIET_FAILURES:
                # The trainer already has newer weights. Its next announcement or report decides what to do.
                logger.info("weight synchronisation %d is repeated: %s", self.record.last_sync_id, error)
                self._failures_in_a_row += 1
                return BACKOFF.pause(self._failures_in_a_row)
            unfit = {(trainer, member): text for member, text in error.unfit.items() if member != trainer}
            self._unfit = {pair: text for pair, text in self._unfit.items() if pair[0] == trainer} | unfit
            if not blamed:  # a trainer also answers with an error when the engines are at fault
                self._excluded.refusals.update(error.refused - {trainer} or error.refused)
        except (StoreUnavailable, BoardUnavailable) as error:
            self.last_failure = str(error)
        finally:
            self._add_totals(sync_seconds=time.monotonic() - started)
        telemetry.record("sync.failures", 1, {"relaxd.run_id": self._context.run_id})
        logger.warning("weight synchronisation %d failed: %s", self.record.last_sync_id, self.last_failure)
        self._excluded.blame(blamed, known=self._registry.holds)
        # The next attempt excludes these engines, so it can start at once.
        excluded = bool(blamed or unfit)
        self._failures_in_a_row = 0 if excluded else self._failures_in_a_row + 1
        return 0.0 if excluded else BACKOFF.pause(self._failures_in_a_row)

    async def _synchronise(
        self,
        trainer: Member,
        engines: list[Member],
        announced: Announcement,
        then: Callable[[], Awaitable[None]] | None,
    ) -> None:
        started = time.monotonic()
        sync_id, version = self.next_id(), (announced.term, announced.version)
        # Engines may pause meanwhile: pauses expire. Everything else waits until the attempt is on record.
        recording = self._record_attempt(sync_id)
        attributes = {"relaxd.sync_id": sync_id, "relaxd.version": announced.version, "relaxd.engines": len(engines)}
        with telemetry.root_span("sync_weights", attributes=attributes):
            try:
                group = self.record.group
                if group is None or group.trainer != trainer or group.engines != tuple(engines):
                    await recording
                    group = await self._connect(sync_id, trainer, engines)
                connected = time.monotonic() - started
                unverified = self._unverified(trainer, engines)
                sent = partial(self._record_digest, announced.version)
                transfer = await self._client.transfer(sync_id, group, version, unverified, recording, sent)
                if then is not None:  # frees the group's device memory
                    await self._client.leave(sync_id, group)
                    await self._save(group=None)
            except (StoreUnavailable, BoardUnavailable):
                await self._client.abort(sync_id, self.record.group, engines)
                raise
            except SyncFailed as error:
                with contextlib.suppress(StoreUnavailable):  # the save below raises it again
                    await recording
                held = f"it held other weights than the trainer sent as version {announced.version}: "
                self._wrong |= {engine: held + names for engine, names in error.wrong.items()}
                if error.wrong:
                    telemetry.record("sync.wrong_engines", len(error.wrong), {"relaxd.run_id": self._context.run_id})
                    logger.error("%s: they are quarantined until the weights are sent again", error)
                silent = await self._client.abort(sync_id, self.record.group, engines, error.silent)
                await self._save(running=False, group=None)
                error.blamed |= silent
                if trainer in silent or (len(engines) > 1 and error.blamed.issuperset(engines)):
                    error.blamed = frozenset()  # the trainer, or all engines at once: no engine is to blame
                raise
        seconds = time.monotonic() - started
        if then is not None:
            await then()
        for member in (trainer, *engines):
            self._excluded.forgive(member)
        for engine in engines:
            self._registry.mark_synced(engine, version)
            self._verified.add((trainer, engine))
            self._wrong.pop(engine, None)
        await self._save(running=False, last_sync_seconds=seconds)
        self._add_totals(
            sync_connect_seconds=connected,
            sync_pause_seconds=transfer.pause,
            sync_receive_seconds=transfer.receive,
            sync_send_seconds=transfer.send,
            sync_resume_seconds=transfer.resume,
            sync_bytes=transfer.bytes_sent,
        )
        telemetry.record("sync.seconds", seconds, {"relaxd.run_id": self._context.run_id})
        logger.info(
            "version %d is on %d engines after %.4f s (connecting %.4f s, receiving %.4f s)",
            *(announced.version, len(engines), seconds, connected, transfer.receive),
        )

    def _add_totals(self, **values: float) -> None:
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def _unverified(self, trainer: Member, engines: Sequence[Member]) -> list[Member]:
        """Return the engines whose weights must be compared with the trainer's in this synchronisation, as
        weights.verify says."""
        match self._context.config.weights.verify:
            case "always":
                return list(engines)
            case "never":
                return []
        self._verified = {pair for pair in self._verified if pair[0] == trainer}
        return [engine for engine in engines if (trainer, engine) not in self._verified]

    async def _record_digest(self, version: int, digest: str) -> None:
        """Record the digest of the sent weights, before an engine can generate with them. Raises BoardUnavailable."""
        if self._context.config.weights.has_receipts:
            await self._context.board.record_weights(term=self._context.term, version=version, digest=digest)
            logger.info("version %d is sent with digest %s", version, digest)

    async def _connect(self, sync_id: int, trainer: Member, engines: list[Member]) -> GroupRecord:
        """Leave the old weight group and connect a new one. Returns the new group's record."""
        began = time.monotonic()
        old = self.record.group
        if old is not None:
            await self._client.leave(sync_id, old)
        manifest = await self._client.manifest(trainer)
        name = f"{self._context.run_id}-{self._context.store.term}-{sync_id}"
        group = GroupRecord(name=name, trainer=trainer, engines=tuple(engines))
        await self._save(group=group)
        await self._client.join(sync_id, group, manifest)
        self._joins.connect_seconds = time.monotonic() - began
        return group

    async def _abort_recorded(self) -> None:
        """Abort a synchronisation that an earlier coordinator, or a Redis outage, interrupted.

        Engines that have received weights, and weren't resumed with them, quarantine themselves. Raises
        StoreUnavailable.
        """
        group = self.record.group
        logger.info("aborting the interrupted synchronisation %d", self.record.last_sync_id)
        await self._save(last_sync_id=self.next_id())
        engines = [engine.member for engine in self._fleet.engines()]
        await self._client.abort(self.record.last_sync_id, group, engines)
        await self._save(running=False, group=None)

    def next_id(self) -> int:
        """Return the id of the next synchronisation: Unix milliseconds, so that ids keep ascending even if Redis lost
        the last one.

        Within a term they also ascend if the system's clock is set back. Members don't compare ids of different terms.
        """
        return max(self.record.last_sync_id + 1, int(steady_time() * 1000))

    async def close(self) -> None:
        """Leave the weight group at the end of the run."""
        group = self.record.group
        if group is not None:
            await self._client.abort(self.record.last_sync_id, group, group.engines)
            await self._save(group=None)

    def _record_attempt(self, sync_id: int) -> "asyncio.Future[None]":
        """Record that a synchronisation is in progress, unless the announcement has already recorded it.

        If the announcement has recorded it, the id isn't saved in Redis: a successor's ids have a later term anyway.
        """
        if not self._recorded_ahead or self._saving.locked():
            return asyncio.create_task(self._save(last_sync_id=sync_id, running=True))
        self.record = self.record.model_copy(update={"last_sync_id": sync_id, "running": True})
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def _save(self, *, ahead: bool = False, **changes: Any) -> None:
        """Change fields of the synchronisation's record, in Redis first. With `ahead`, the record in Redis already says
        that a synchronisation is in progress.

        The synchronisation follows at once and then needn't wait for Redis. If the coordinator dies before it begins,
        the successor only connects a new group.
        """
        async with self._saving:  # an announcement may arrive at any time
            record = self.record.model_copy(update=changes)
            stored = record.model_copy(update={"running": record.running or ahead})
            await self._context.store.save_weights(stored)
            self.record, self._recorded_ahead = record, stored.running


def waits_for_updates(trainer: Replica, announced: Announcement, engines: Sequence[Replica]) -> str:
    """Describe the engines that wait because the trainer is already changing the announced weights; "" if none does.

    The trainer would refuse attempts before the step's end, and each would pause the engines. In a step of several
    updates the trainer keeps a copy of the announced weights and sends the copy.
    """
    weights = trainer.status.weights
    newest = (weights.term, weights.version) == (announced.term, announced.version)
    waiting = [engine.replica_id for engine in engines if engine.version != (announced.term, announced.version)]
    if not trainer.status.gauges.get("changing_weights") or not newest or not waiting:
        return ""
    return (
        f"{', '.join(waiting)} wait{'s' * (len(waiting) == 1)} for weights, which {trainer.replica_id} is changing "
        f"({trainer.status.detail})"
    )
