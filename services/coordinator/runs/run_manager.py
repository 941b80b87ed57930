"""Manager of runs: the active run with its task, and earlier runs known from their records."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from relaxd.board import roles_for, stages_for
from relaxd.config import BoardConfig, RunConfig
from relaxd.data.dataset import RunData, load_data
from relaxd.models import DataError
from relaxd.process.upkeep import freeze_objects
from relaxd.rpc.errors import AlreadyExists, FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from relaxd.rpc.message_parts import newest_first
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.run_folder import is_run
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.waiting import waits
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.fleet.run_fleet import Fleet, RunContext
from services.coordinator.runs.active_run import ActiveRun
from services.coordinator.runs.ending import Retention
from services.coordinator.runs.restoring import Restored, read_run
from services.coordinator.runs.run_files import FolderHeld, RunFiles, held_folder
from services.coordinator.runs.run_messages import health_messages, run_message, run_state
from services.coordinator.runs.starting import check_same_prompts, prepare, request_digest
from services.coordinator.state.records import Event, Outcome, Phase, RunRecord
from services.coordinator.state.retries import MediaHostRetry, RedisRetry, outlives_caller
from services.coordinator.state.store import AnotherRunActive, AsyncStore, RunBoard, RunBoards, RunIdTaken, read_board

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_ENDED_RUNS = 1000
"""Maximum number of ended runs to cache."""


@dataclass(frozen=True)
class RunDigest:
    """State of a run that is known without reading Redis. Watchers of the run learn of changes at once."""

    state: "pb.RunState.ValueType"
    reason: str
    step: int
    """The last step that the coordinator saw; 0 if the run isn't active."""


class RunManager:
    """Starts, restores, resumes, deletes and finds the runs of this coordinator."""

    def __init__(
        self,
        store: AsyncStore,
        registry: Registry,
        peers: Peers,
        settings: ServiceSettings,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`on_error` receives errors that end the coordinator, such as Superseded."""
        self._store = store
        self._registry = registry
        self._peers = peers
        self._settings = settings
        self._retention = Retention(settings.keep_runs, settings.keep_run_bytes, settings.keep_run_days)
        self._on_error = on_error
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._boards = RunBoards(settings.redis)
        self._ended_runs: dict[str, pb.Run] = {}
        """Messages (pb.Run) about ended runs, which never change, by run id."""
        self._last_active = pb.Run()
        """Last message (pb.Run) about the active run, repeated while Redis doesn't answer."""
        self.active: ActiveRun | None = None
        self._assigned: tuple[RunRecord, pb.Assignment] | None = None
        """The active run's record, and the assignment made from it. Replicas get this assignment with each heartbeat's
        answer."""
        self._ended = ""
        """Sentence about how the last active run ended, for errors of requests that come after its end."""

    # --- start and end --------------------------------------------------------------------------------------------

    @outlives_caller("the start of a run")
    async def start(self, run_id: str, config_toml: str, request_id: str = "") -> RunRecord:
        """Check the configuration and start a run, even if the caller disconnects meanwhile.

        With a known request id, return the run that this request started. Raises InvalidArgument, AlreadyExists,
        FailedPrecondition.
        """
        async with self._starting:
            known = await self._store.started_by(request_id) if request_id else None
            if known is not None and known.request_digest != request_digest(run_id, config_toml):
                raise AlreadyExists(
                    f"request {request_id!r} started run {known.run_id!r} with another run_id or configuration: choose "
                    "another request_id"
                )
            if known is not None:
                return await self.record(known.run_id)
            if run_id and await self._store.run(run_id) is not None:
                raise AlreadyExists(f"a run {run_id!r} exists: choose another run_id")
            await self._wait_for_clean_up()
            if self.active is not None:
                raise self._busy(self.active.record.run_id)
            await self._end_deletion(run_id)
            redis, stack = self._settings.redis, self._settings.stack
            prepared = await asyncio.to_thread(prepare, run_id, config_toml, request_id, redis, stack)
            with prepared.held as held:
                active = await self._active_run(prepared.record, prepared.config, prepared.data, prepared.files)
                await self._create(prepared.record)
                kept = held.pop_all()
            if prepared.data.skipped:
                logger.warning("%d prompts are skipped: they are too long", prepared.data.skipped)
            if prepared.data.repeated:
                logger.info("%d prompts are left out: they are there twice", prepared.data.repeated)
            for warning in prepared.warnings:
                logger.warning("%s", warning)
            self._launch(active, kept)
            return prepared.record

    @outlives_caller("the restoration of a run")
    async def restore(self, folder: str, steps: int = 0, *, new_data: bool = False) -> ActiveRun:
        """From its folder, restore and resume a run that Redis lost; with `steps`, extend an ended run.

        The call completes even if the caller disconnects. With `new_data` the run's prompts may differ from before.

        Raises InvalidArgument, AlreadyExists, FailedPrecondition; ResourceExhausted: the folder is not writable, and
        the run stays as it is.
        """
        async with self._starting:
            await self._wait_for_clean_up()
            if self.active is not None:
                raise self._busy(self.active.record.run_id)
            own = self._settings.stack
            with ExitStack() as held:
                # A predecessor of this stack may still live, and learns soon that it was replaced.
                holding = held_folder(Path(folder), own, beside={own} - {""})
                try:
                    if await asyncio.to_thread(is_run, Path(folder)):  # else nothing is written there
                        await asyncio.to_thread(held.enter_context, holding)
                except FolderHeld as error:
                    raise FailedPrecondition(
                        f"the coordinator of stack {error.holder!r} works on the run in {folder}, this is stack "
                        f"{own!r}: stop the run, or the services, of that stack first",
                        reason="STACK_MISMATCH",
                        subject=folder,
                    ) from error
                return await self._restore_held(folder, steps, held, new_data=new_data)

    async def _restore_held(self, folder: str, steps: int, held: ExitStack, *, new_data: bool) -> ActiveRun:
        """Restore and launch the run of a folder that this coordinator holds until `held` is closed."""
        restored = await asyncio.to_thread(read_run, folder, steps, new_data=new_data)
        run_id = restored.record.run_id
        known = await self._store.run(run_id)
        again = known is not None and known.phase.ended and known.folder == restored.record.folder
        repaired = known is not None and known.outcome in (Outcome.DATA_FAILED, Outcome.FOLDER_HELD)
        if known is not None and not (again and (steps or new_data or repaired)):
            raise AlreadyExists(f"run {run_id!r} is still in Redis: there is nothing to restore")
        await asyncio.to_thread(_begin_again, restored, extended=steps > 0)  # before anything else changes
        if known is not None:
            await self._delete(known)  # its folder has everything
        await self._end_deletion(run_id)
        active = await self._active_run(restored.record, restored.config, restored.data, restored.files)

        def fill() -> None:
            board = active.board.in_threads
            board.delete()  # the remains of a failed attempt
            board.create(
                term=self._store.term,
                groups_per_step=restored.config.trainer.groups_per_step,
                steps=restored.config.run.steps,
            )
            board.restore(
                ledger=restored.ledger,
                cursor=restored.cursor.to_json(),
                dropped=restored.dropped,
                trainer_term=restored.trainer_term,
            )

        await asyncio.to_thread(fill)
        await self._create(restored.record)
        logger.warning("run %s is restored from %s, after step %d", run_id, folder, len(restored.ledger))
        self._launch(active, held.pop_all())
        return active

    async def resume(self) -> None:
        """Resume the run that an earlier coordinator left active, if any."""
        run_id = await self._store.active_run_id()
        record = await self._store.run(run_id) if run_id else None
        if record is None:
            return
        config = RunConfig.model_validate_json(record.config_json)
        held = ExitStack()
        try:
            own = self._settings.stack
            await asyncio.to_thread(held.enter_context, held_folder(Path(record.folder), own, beside=(own,)))
            data = await MediaHostRetry(f"run {run_id}", config.data).in_thread(load_data, config)
            await asyncio.to_thread(check_same_prompts, record, config, data.train)
            digest = await asyncio.to_thread(lambda: data.train.digest)
        except FolderHeld as error:
            reason = f"stack {error.holder!r} works on the run in {record.folder}: it was restored there meanwhile"
            await self._not_resumed(record, Outcome.FOLDER_HELD, reason)
            return
        except DataError as error:
            with held:
                failed = await self._not_resumed(record, Outcome.DATA_FAILED, str(error))
                with contextlib.suppress(OSError):  # Redis has the record
                    await asyncio.to_thread(RunFiles(Path(record.folder)).write_record, failed)
            return
        logger.info("resuming run %s (%s)", run_id, record.phase.value.lower())
        record = record.model_copy(update={"prompts": data.train.prompts, "prompts_digest": digest})
        active = await self._active_run(record, config, data, RunFiles(Path(record.folder)))
        self._launch(active, held)

    async def _not_resumed(self, record: RunRecord, outcome: Outcome, reason: str) -> RunRecord:
        """Mark a run that can't continue after a restart as failed in Redis, and return its record."""
        end = {"phase": Phase.FAILED, "outcome": outcome, "reason": f"after a restart: {reason}"}
        failed = record.model_copy(update=end | {"end_time": datetime.now(UTC)})
        await self._store.save_run(failed)
        logger.error("run %s can't be resumed: %s", record.run_id, reason)
        return failed

    @outlives_caller("the deletion of a run")
    async def delete(self, run_id: str) -> None:
        """Delete an ended run from Redis, even if the caller disconnects meanwhile; its folder stays.

        Raises NotFound, FailedPrecondition; Unavailable: a Redis server doesn't answer, and the rest is deleted later.
        """
        async with self._starting:
            record = await self._store.run(run_id)
            if record is None:
                raise NotFound(f"there is no run {run_id!r}")
            if not record.phase.ended:
                raise FailedPrecondition(f"run {run_id!r} has not ended: stop it first", reason="RUN_NOT_ENDED")
            await self._delete(record)

    async def delete_expired(self) -> None:
        """Delete runs beyond the retention limits, and finish deletions of an earlier coordinator."""
        async with self._starting:
            for run_id in await self._store.deleting():
                try:
                    await self._end_deletion(run_id)
                except Unavailable as error:  # such as a data node that only this run has
                    logger.warning("run %s is still to be deleted: %s", run_id, error)
            records = await self.all()
            runs = [(record, record.board_bytes) for record in records]
            expired = set(self._retention.expired(runs, datetime.now(UTC)))
            for record in records:
                if record.run_id in expired:
                    logger.info("deleting run %s from Redis: it ended on %s", record.run_id, record.end_time)
                    await self._delete(record)

    async def _wait_for_clean_up(self) -> None:
        """Wait until an ended run's task has stopped, because it still uses the run's board."""
        if self._task is not None and self.active is not None and self.active.record.phase.ended:
            await asyncio.wait([self._task])

    async def _delete(self, record: RunRecord) -> None:
        await self._wait_for_clean_up()
        board = self.board(record)
        await self._store.begin_delete(record.run_id, record.request_id)
        self._ended_runs.pop(record.run_id, None)
        self._boards.forget(record.run_id)
        await self._delete_board(record.run_id, board)

    async def _end_deletion(self, run_id: str) -> None:
        """Finish an interrupted deletion of this id, which would otherwise delete the next run of this id.

        Raises Unavailable: a Redis server still doesn't answer.
        """
        if run_id in await self._store.deleting():
            await self._delete_board(run_id, RunBoard(self._settings.redis, run_id, (), BoardConfig()))

    async def _delete_board(self, run_id: str, board: RunBoard) -> None:
        """Delete a run's board from Redis, and record that the deletion is complete."""
        try:
            await read_board(board.delete())
            await self._store.end_delete(run_id)
        finally:
            await board.close()

    async def close(self) -> None:
        """Cancel the active run's task; the next coordinator resumes the run."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._boards.close()

    async def _create(self, record: RunRecord) -> None:
        """Record a run as the active one, as soon as Redis answers; nothing may fail between this and `_launch`.

        An attempt whose answer was lost may have made the run active, with no task to drive it; so attempts are
        repeated. Raises AlreadyExists, FailedPrecondition; Unavailable: Redis is full, or a newer coordinator has taken
        over.
        """
        try:
            await RedisRetry(f"run {record.run_id}").call(self._store.create_run, record)
        except RunIdTaken as error:
            raise AlreadyExists(f"a run {error} exists: choose another run_id") from error
        except AnotherRunActive as error:
            raise self._busy(str(error)) from error

    async def _active_run(self, record: RunRecord, config: RunConfig, data: RunData, files: RunFiles) -> ActiveRun:
        """Return an active run with its board, fleet and files, ready for `_launch`. Raises StoreUnavailable."""
        context = RunContext(
            run_id=record.run_id,
            config=config,
            board=RunBoard(self._settings.redis, record.run_id, stages_for(config), config.board),
            store=self._store,
            fleet=Fleet(self._registry, record.run_id, roles_for(config)),
            peers=self._peers,
            launcher=self._settings.launcher,
        )
        return ActiveRun(context, record, data, files, await self._store.weights())

    def _launch(self, active: ActiveRun, held: ExitStack) -> None:
        """Start the task that drives the run. At its end the task closes `held`, which releases the run's folder."""
        freeze_objects()  # also those of the last run are collected
        self.active = active
        self._ended_runs.pop(active.record.run_id, None)  # an earlier run of this id
        self._boards.keep(active.board)
        self._task = asyncio.create_task(self._drive(active, held))
        self._task.add_done_callback(self._on_end)
        self._registry.changed.fire()

    async def _drive(self, active: ActiveRun, held: ExitStack) -> None:
        with held:
            await active.main()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if self.active is not None and (record := self.active.record).phase.ended:
            self._ended = f"run {record.run_id!r} has ended ({record.reason})"
        self.active = None
        self._registry.changed.fire()
        if task.cancelled():
            if not self._closing:
                self._on_error(RuntimeError("the run's task was cancelled unexpectedly"))
        elif (error := task.exception()) is not None:
            self._on_error(error)

    def _busy(self, run_id: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"run {run_id!r} is active, and only one may be: stop it, or wait for its end",
            reason="RUN_ACTIVE",
            subject=run_id,
        )

    # --- lookup ---------------------------------------------------------------------------------------------------

    def require_active(self, run_id: str) -> ActiveRun:
        """Return the active run; a non-empty `run_id` must be its id. Raises FailedPrecondition."""
        if self.active is None:
            ended = f": {self._ended}" if self._ended else ""
            raise FailedPrecondition(f"no run is active{ended}", reason="NO_ACTIVE_RUN")
        if run_id and run_id != self.active.record.run_id:
            raise FailedPrecondition(
                f"run {run_id!r} is not active: {self.active.record.run_id!r} is",
                reason="RUN_NOT_ACTIVE",
                subject=run_id,
            )
        return self.active

    async def record(self, run_id: str) -> RunRecord:
        """Return a run's record; without an id, the newest run's. Raises NotFound."""
        if self.active is not None and run_id in ("", self.active.record.run_id):
            return self.active.record
        if not run_id:
            run_ids = await self._store.run_ids()
            if not run_ids:
                raise NotFound("there is no run yet")
            run_id = run_ids[0]
        record = await self._store.run(run_id)
        if record is None:
            raise NotFound(f"there is no run {run_id!r}")
        return record

    async def all(self) -> list[RunRecord]:
        """Return all runs with a record, newest first."""
        records = []
        for run_id in await self._store.run_ids():
            with contextlib.suppress(NotFound):  # it was deleted meanwhile
                records.append(await self.record(run_id))
        return records

    def board(self, record: RunRecord) -> RunBoard:
        """Return a connected board for a run."""
        return self._boards.open(record, active=self.active.record.run_id if self.active else None)

    def glance(self, record: RunRecord) -> RunDigest:
        """Return the state of a run that is known without reading Redis."""
        active = self._active(record)
        return RunDigest(run_state(record), record.reason_shown, active.step if active is not None else 0)

    def _active(self, record: RunRecord) -> ActiveRun | None:
        """Return the active run if it has this record's id, otherwise None."""
        return self.active if self.active is not None and self.active.record.run_id == record.run_id else None

    async def message(self, record: RunRecord) -> pb.Run:
        """Return the message (pb.Run) that describes a run to clients; while Redis doesn't answer, the active run's
        last message. Raises Unavailable."""
        active = self._active(record)
        if active is None and record.run_id in self._ended_runs:  # the active run may be of the same id
            return self._ended_runs[record.run_id]
        config = active.config if active is not None else RunConfig.model_validate_json(record.config_json)
        run = pb.Run()
        if active is not None and active.waiting.redis_is_away and self._last_active.run_id == record.run_id:
            run.CopyFrom(self._last_active)  # reading would take as long as Redis's timeouts
        else:
            oldest = active.oldest_version() if active is not None else None
            run = await read_board(run_message(record, config.run.steps, self.board(record), oldest))
        if active is not None:
            self._last_active = pb.Run()  # a new one: a message that is filled again and again frees no memory
            self._last_active.CopyFrom(run)
            # run.json of an ended run may still wait for the disk
            if not record.phase.ended or any(wait.disk for wait in waits()):
                active.waiting.describe(run)
            run.metrics.update(active.curriculum.metrics())
            run.alarms.extend(active.alarms())
            run.health.extend(health_messages(active.health.record, active.config.health))
        elif record.phase.ended:
            if len(self._ended_runs) >= MAX_ENDED_RUNS:
                self._ended_runs.pop(next(iter(self._ended_runs)))
            self._ended_runs[record.run_id] = run
        return run

    async def summaries(self, after: str) -> AsyncIterator[tuple[str, pb.Run]]:
        """Yield all runs after the key `after`, newest first, without their large fields. Raises Unavailable."""
        times = await self._store.run_times()
        for key, run_id in sorted((newest_first(time, run_id), run_id) for run_id, time in times.items()):
            if key > after:
                with contextlib.suppress(NotFound):  # it was deleted meanwhile
                    run = pb.Run()
                    run.CopyFrom(await self.message(await self.record(run_id)))
                    for field in ("metrics", "config_json", "health", "wait", "alarms"):
                        run.ClearField(field)
                    yield key, run

    async def events(self, record: RunRecord) -> Sequence[Event]:
        """Return the latest health events of a run, oldest first. Raises Unavailable."""
        if (active := self._active(record)) is not None:
            return active.health.record.events
        return (await self._store.health(record.run_id)).events

    def assignment(self, replica_id: str) -> pb.Assignment:
        """Return a replica's assignment: the active run, a reason to idle, or an empty assignment without a run."""
        if self.active is None or not self.active.assignable:
            return pb.Assignment()
        if reason := self.active.fleet.idle_reason(replica_id):
            return pb.Assignment(idle_reason=reason)
        record = self.active.record
        if self._assigned is None or self._assigned[0] is not record:
            assignment = pb.Assignment(
                run_id=record.run_id, config_json=record.config_json, state=run_state(record), folder=record.folder
            )
            assignment.begin_time.FromDatetime(record.begin_time)
            self._assigned = record, assignment
        return self._assigned[1]


def _begin_again(restored: Restored, *, extended: bool) -> None:
    """Remove summary.json of an ended run that continues. If the run is `extended`, write its new configuration.

    Raises ResourceExhausted: the folder can't be written to, for example because its disk is full.
    """
    try:
        if extended:
            restored.files.write_config(restored.config)
        restored.files.remove_summary()
    except OSError as error:
        raise ResourceExhausted(
            f"run {restored.record.run_id!r} can't go on: {restored.files.folder} can't be written to: {error}. It "
            "stays as it is: make room on its disk, and resume it again"
        ) from error
