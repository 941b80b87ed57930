"""All runs: the active one with its task, the earlier ones from their records."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from relaxd.board import Board, BoardUnavailable, stages_for
from relaxd.config import BoardConfig, RunConfig
from relaxd.data.dataset import load_data
from relaxd.data.errors import DataError
from relaxd.rpc.errors import AlreadyExists, FailedPrecondition, NotFound, Unavailable
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.health.view import health_messages
from services.coordinator.runs.active_run import ActiveRun, Context
from services.coordinator.runs.restoring import read_run
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.runs.starting import prepare
from services.coordinator.runs.view import run_message, run_state
from services.coordinator.state.health_records import Event
from services.coordinator.state.records import Phase, RunRecord
from services.coordinator.state.store import AnotherRunActive, RunIdTaken

logger = logging.getLogger(__name__)


Result = TypeVar("Result")

MAX_ENDED_RUNS = 1000
"""Runs that have ended that aren't read from the board again."""
MAX_BOARDS = 8
"""Boards of runs that aren't active that are kept open."""


async def read_board(operation: Callable[..., Result], *arguments: Any) -> Result:
    """Do something on the board, in a thread. Raises Unavailable: Redis doesn't answer."""
    try:
        return await asyncio.to_thread(operation, *arguments)
    except BoardUnavailable as error:
        raise Unavailable(str(error)) from error


class RunManager:
    """Starts runs, takes up the one that an earlier coordinator left, and finds runs by id."""

    def __init__(self, context: Context, on_error: Callable[[BaseException], None]) -> None:
        """`on_error` is told when the active run's task ends by an error that is not the run's own."""
        self._context = context
        self._on_error = on_error
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._boards: dict[str, Board] = {}
        self._ended_runs: dict[str, pb.Run] = {}
        """Runs that have ended, as they will be for ever."""
        self.active: ActiveRun | None = None

    # --- starting, ending -----------------------------------------------------------------------------------------

    async def start(self, run_id: str, config_toml: str) -> ActiveRun:
        """Check everything and start a run.

        Raises InvalidArgument, AlreadyExists, FailedPrecondition.
        """
        async with self._starting:
            if run_id and await asyncio.to_thread(self._context.store.run, run_id) is not None:
                raise AlreadyExists(f"a run {run_id!r} exists: choose another run_id")
            if self._task is not None and self.active is not None and self.active.record.phase.ended:
                await asyncio.wait([self._task])  # it has ended for everybody, and is putting its things away
            if self.active is not None:
                raise self._busy(self.active.record.run_id)
            prepared = await asyncio.to_thread(prepare, run_id, config_toml, self._context.redis_url)
            try:
                await asyncio.to_thread(self._context.store.create_run, prepared.record)
            except RunIdTaken as error:
                raise AlreadyExists(f"a run {error} exists: choose another run_id") from error
            except AnotherRunActive as error:
                raise self._busy(str(error)) from error
            if prepared.data.skipped:
                logger.warning("%d prompts are left out: they are too long", prepared.data.skipped)
            for warning in prepared.warnings:
                logger.warning("%s", warning)
            active = ActiveRun(self._context, prepared.record, prepared.config, prepared.data, prepared.files)
            self._go(active)
            return active

    async def restore(self, folder: str) -> ActiveRun:
        """Take up a run from its folder, on a Redis that doesn't know it.

        Raises InvalidArgument, AlreadyExists, FailedPrecondition.
        """
        async with self._starting:
            if self.active is not None:
                raise self._busy(self.active.record.run_id)
            found = await asyncio.to_thread(read_run, folder)
            run_id = found.record.run_id
            if await asyncio.to_thread(self._context.store.run, run_id) is not None:
                raise AlreadyExists(f"Redis knows run {run_id!r}: it goes on from there")
            active = ActiveRun(self._context, found.record, found.config, found.data, found.files)

            def fill() -> None:
                active.board.delete()  # what an attempt that didn't end well left
                active.board.create(
                    term=self._context.store.term,
                    groups_per_step=found.config.trainer.groups_per_step,
                    steps=found.config.run.steps,
                )
                active.board.restore(
                    ledger=found.ledger,
                    cursor=found.cursor.to_json(),
                    dropped=found.dropped,
                    trainer_term=found.trainer_term,
                )
                self._context.store.create_run(found.record)

            try:
                await asyncio.to_thread(fill)
            except AnotherRunActive as error:
                raise self._busy(str(error)) from error
            logger.warning("run %s is restored from %s, after step %d", run_id, folder, len(found.ledger))
            self._go(active)
            return active

    async def take_up(self) -> None:
        """Go on with the run that an earlier coordinator left, if there is one."""
        run_id = await asyncio.to_thread(self._context.store.active_run_id)
        record = await asyncio.to_thread(self._context.store.run, run_id) if run_id else None
        if record is None:
            return
        config = RunConfig.model_validate_json(record.config_json)
        try:
            data = await asyncio.to_thread(load_data, config)
        except DataError as error:
            failed = record.model_copy(update={"phase": Phase.FAILED, "reason": f"after a restart: {error}"})
            await asyncio.to_thread(self._context.store.save_run, failed)
            logger.error("run %s can't go on: %s", run_id, error)
            return
        logger.info("going on with run %s (%s)", run_id, record.phase.value.lower())
        self._go(ActiveRun(self._context, record, config, data, RunFiles(Path(record.folder))))

    async def delete(self, run_id: str) -> None:
        """Forget a run that has ended; its folder stays. Raises NotFound, FailedPrecondition."""
        async with self._starting:
            record = await asyncio.to_thread(self._context.store.run, run_id)
            if record is None:
                raise NotFound(f"there is no run {run_id!r}")
            if not record.phase.ended:
                raise FailedPrecondition(f"run {run_id!r} has not ended: stop it first")
            await self._forget(record)

    async def tidy(self) -> None:
        """Forget runs that ended too long ago or take too much of Redis, and finish what a dead coordinator began."""
        async with self._starting:
            for run_id in await asyncio.to_thread(self._context.store.deleting):
                await self._clear(run_id, Board(self._context.redis_url, run_id, (), BoardConfig()))
            records = await self.all()
            runs = [(record, record.board_bytes) for record in records]
            expired = set(self._context.retention.expired(runs, datetime.now(UTC)))
            for record in records:
                if record.run_id in expired:
                    logger.info("run %s ended on %s: Redis forgets it", record.run_id, record.end_time)
                    await self._forget(record)

    async def _forget(self, record: RunRecord) -> None:
        board = self.board(record)
        await asyncio.to_thread(self._context.store.begin_delete, record.run_id)
        self._ended_runs.pop(record.run_id, None)
        self._boards.pop(record.run_id, None)
        await self._clear(record.run_id, board)

    async def _clear(self, run_id: str, board: Board) -> None:
        """Delete what a forgotten run has on the board."""
        try:
            await read_board(board.delete)
            await asyncio.to_thread(self._context.store.end_delete, run_id)
        finally:
            board.close()

    async def close(self) -> None:
        """End the active run's task; the run itself goes on with the next coordinator."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _go(self, active: ActiveRun) -> None:
        self.active = active
        self._boards[active.record.run_id] = active.board
        self._task = asyncio.create_task(active.main())
        self._task.add_done_callback(self._ended)
        self._context.registry.changed.fire()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.active = None
        self._context.registry.changed.fire()
        if task.cancelled():
            if not self._closing:
                self._on_error(RuntimeError("the run's task was cancelled by nobody"))
        elif (error := task.exception()) is not None:
            self._on_error(error)

    def _busy(self, run_id: str) -> FailedPrecondition:
        return FailedPrecondition(f"run {run_id!r} is active, and one run is active at a time: stop it, or wait")

    # --- finding --------------------------------------------------------------------------------------------------

    def require_active(self, run_id: str) -> ActiveRun:
        """The active run; `run_id`, where given, must be its id. Raises FailedPrecondition, NotFound."""
        if self.active is None:
            raise FailedPrecondition("no run is active")
        if run_id and run_id != self.active.record.run_id:
            raise FailedPrecondition(f"run {run_id!r} is not active: {self.active.record.run_id!r} is")
        return self.active

    async def record(self, run_id: str) -> RunRecord:
        """A run's record; without an id, the newest run's. Raises NotFound."""
        if self.active is not None and run_id in ("", self.active.record.run_id):
            return self.active.record
        if not run_id:
            run_ids = await asyncio.to_thread(self._context.store.run_ids)
            if not run_ids:
                raise NotFound("there is no run yet")
            run_id = run_ids[0]
        record = await asyncio.to_thread(self._context.store.run, run_id)
        if record is None:
            raise NotFound(f"there is no run {run_id!r}")
        return record

    async def all(self) -> list[RunRecord]:
        """Every run, newest first."""
        run_ids = await asyncio.to_thread(self._context.store.run_ids)
        return [await self.record(run_id) for run_id in run_ids]

    def board(self, record: RunRecord) -> Board:
        """The board of a run."""
        board = self._boards.pop(record.run_id, None)
        if board is None:
            config = RunConfig.model_validate_json(record.config_json)
            board = Board(self._context.redis_url, record.run_id, stages_for(config), config.board)
        self._boards[record.run_id] = board  # the last is the one used last
        self._close_boards()
        return board

    def _close_boards(self) -> None:
        """Let go of the boards of runs that nobody has looked at lately: each has connections to Redis."""
        active = self.active.record.run_id if self.active else None
        for run_id in [run_id for run_id in self._boards if run_id != active][:-MAX_BOARDS]:
            self._boards.pop(run_id).close()  # who reads from it just now connects again

    async def message(self, record: RunRecord) -> pb.Run:
        """A run as it is now. Raises Unavailable."""
        if record.run_id in self._ended_runs:
            return self._ended_runs[record.run_id]
        steps = RunConfig.model_validate_json(record.config_json).run.steps
        active = self.active
        oldest = active.oldest_version() if active is not None and active.record.run_id == record.run_id else None
        run = await read_board(run_message, record, steps, self.board(record), oldest)
        if active is not None and active.record.run_id == record.run_id:
            run.waiting_for = active.waiting_for
            run.health.extend(health_messages(active.health.record, active.config.health))
        elif record.phase.ended:
            if len(self._ended_runs) >= MAX_ENDED_RUNS:
                self._ended_runs.pop(next(iter(self._ended_runs)))
            self._ended_runs[record.run_id] = run
        return run

    async def events(self, record: RunRecord) -> Sequence[Event]:
        """What happened to the health of a run, oldest first; the last ones. Raises Unavailable."""
        if self.active is not None and self.active.record.run_id == record.run_id:
            return self.active.health.record.events
        return (await asyncio.to_thread(self._context.store.health, record.run_id)).events

    def assignment(self) -> pb.Assignment:
        """What the replicas have to work on."""
        if self.active is None or not self.active.assignable:
            return pb.Assignment()
        record = self.active.record
        return pb.Assignment(
            run_id=record.run_id, config_json=record.config_json, state=run_state(record), folder=record.folder
        )
