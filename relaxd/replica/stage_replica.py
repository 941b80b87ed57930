"""The service of a replica that works on one stage of the board: reward, advantage, a teacher with an engine."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from relaxd.board import Board, StageWorker, stages_for
from relaxd.board.worker import Process
from relaxd.config import RunConfig
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus
from relaxd.v1.coordinator_pb2 import Assignment


class StageReplica(ReplicaService):
    """Takes a stage's groups from the assigned run's board, processes them with the function that `prepare` returns,
    and commits the results."""

    stage: ClassVar[str]
    """Name of the stage whose groups the replica processes."""
    max_connection_age_seconds: ClassVar[float | None] = 30.0

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._settings = context.settings
        self._worker: StageWorker | None = None
        self._board: Board | None = None
        self._done_before = 0
        self._detail = ""

    @abstractmethod
    async def prepare(self, config: RunConfig) -> tuple[Process, int | Callable[[], int]]:
        """Prepare for a run. Returns the function that processes groups, and the number of groups to process at once.

        An exception is reported as the status's detail, and the start is tried again later.
        """

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        stages = stages_for(config)
        self._detail = ""
        if self.stage not in {stage.name for stage in stages}:
            self._detail = f"this run needs no {self.stage} service"
            return
        process, concurrency = await self.prepare(config)
        self._board = Board(self._settings.redis, assignment.run_id, stages, config.board)
        self._worker = StageWorker(
            self._board,
            self.stage,
            self._settings.replica_id,
            process,
            concurrency=concurrency,
            on_failure=self._context.give_up,
        )
        await asyncio.to_thread(self._worker.start)

    async def stop_run(self) -> None:
        worker, board = self._worker, self._board
        self._worker = self._board = None
        if worker is not None:
            await asyncio.to_thread(worker.stop)
            self._done_before += worker.done
        if board is not None:
            await asyncio.to_thread(board.close)
        self._context.user_messages.clear()

    async def pause_run(self) -> None:
        if self._worker is not None:
            self._worker.pause()

    async def resume_run(self) -> None:
        if self._worker is not None:
            self._worker.resume()

    async def drain(self, seconds: float) -> int:
        if self._worker is None:
            return 0
        # Handing back unfinished groups takes part of the time.
        await asyncio.to_thread(self._worker.drain, seconds - min(1.0, seconds / 4))
        return self._worker.held if self._worker is not None else 0

    def status(self) -> ServiceStatus:
        if self._worker is None:
            return ServiceStatus(done_groups=self._done_before, detail=self._detail)
        done = self._done_before + self._worker.done
        return ServiceStatus(held_groups=self._worker.held, done_groups=done, progress=done + self.pieces())

    def pieces(self) -> int:
        """Return a counter of work on unfinished groups, for ReplicaStatus.progress."""
        return 0
