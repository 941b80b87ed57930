"""Brings a service to what its assignment says."""

import asyncio
import logging
from collections.abc import Callable

import pydantic

from relaxd.config import RunConfig
from relaxd.rpc.errors import InvalidArgument
from relaxd.rpc.gpus import GpuLeases
from relaxd.rpc.service import ReplicaService
from relaxd.v1 import coordinator_pb2, replica_pb2
from relaxd.v1.coordinator_pb2 import Assignment

STOP_RUN_SECONDS = 60.0
"""stop_run may take this long before the replica goes on without it."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 30.0
_ENDED = (coordinator_pb2.RUN_STATE_STOPPED, coordinator_pb2.RUN_STATE_FAILED)

_log = logging.getLogger(__name__)


class AssignmentFollower:
    """Starts, pauses, resumes and stops the service's run, one thing at a time, in the task of `run`.

    `changed` is called whenever `state` or `run_id` changes. `gpus` are given back when a run has been stopped; a
    replica that has some and was drained leaves the run, so that others can have them.
    """

    def __init__(self, service: ReplicaService, changed: Callable[[], None], gpus: GpuLeases) -> None:
        self.state: replica_pb2.ReplicaState.ValueType = replica_pb2.REPLICA_STATE_IDLE
        """IDLE, STARTING, READY or FAILED; `draining` is beside it."""
        self.detail = ""
        self.run_id = ""
        """The run that is started, starting or failed to start."""
        self.draining = False
        self._service = service
        self._changed = changed
        self._gpus = gpus
        self._drained = self._restart = False
        self._idle = asyncio.Event()
        self._wanted = Assignment()
        self._wake = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._paused = False
        self._attempts = 0

    def assign(self, assignment: Assignment, drain: bool = False) -> None:
        """What to work on from now on. A new run ends a drain, unless `drain` says to go on with it."""
        if assignment == self._wanted:
            return
        if assignment.run_id != self._wanted.run_id:
            self.draining, self._drained = drain, False
            self._attempts = 0
        self._wanted = assignment
        self._interrupt()

    async def drain(self, seconds: float) -> int:
        """Take no new work and finish or hand back what is held; returns how many groups are still held."""
        if not self.draining:
            self.draining = True
            self._interrupt()
            self._changed()
        if self.state != replica_pb2.REPLICA_STATE_READY:
            return 0
        try:
            async with asyncio.timeout(seconds):
                held = await self._service.drain(seconds)
        except TimeoutError:
            return self._service.status().held_groups
        if not held and self.draining and self._gpus.held:
            self._drained = True
            self._wake.set()
        return held

    def undrain(self) -> None:
        """Work again after a drain: the run is started anew."""
        if self.draining:
            self.draining = self._drained = False
            self._restart = True
            self._interrupt()
            self._changed()

    def begin_again(self) -> None:
        """Leave the run and start it anew: what it was started with is gone."""
        self._restart = True
        self._interrupt()

    async def dismiss(self) -> None:
        """Forget the assignment and the drain; returns once the run has been stopped."""
        self._wanted = Assignment()
        self.draining = self._drained = False
        self._interrupt()
        if self.state != replica_pb2.REPLICA_STATE_IDLE:
            await self._idle.wait()

    async def run(self) -> None:
        """Follow the assignment until cancelled."""
        while True:
            self._wake.clear()
            if self.run_id and (self.run_id != self._target() or self._restart):
                await self.stop()
            self._restart = False
            retry_seconds = None
            if self._target() and self.state in (replica_pb2.REPLICA_STATE_IDLE, replica_pb2.REPLICA_STATE_FAILED):
                retry_seconds = await self._start(self._wanted)
            if self.state == replica_pb2.REPLICA_STATE_READY:
                await self._follow_pause()
            try:
                async with asyncio.timeout(retry_seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def stop(self, seconds: float = STOP_RUN_SECONDS) -> None:
        """End the run, if there is one, and be idle."""
        if self.state in (replica_pb2.REPLICA_STATE_STARTING, replica_pb2.REPLICA_STATE_READY):
            _log.info("leaving run %s", self.run_id)
            await self._clean_up(seconds)
        self.run_id = ""
        self._be(replica_pb2.REPLICA_STATE_IDLE)

    def _target(self) -> str:
        """The run to be in; none while draining, unless it is the one that the groups still held belong to."""
        wanted = self._wanted
        if wanted.state in _ENDED or (self.draining and self.state != replica_pb2.REPLICA_STATE_READY):
            return ""
        if self._drained:
            return ""
        return wanted.run_id

    def _interrupt(self) -> None:
        self._wake.set()
        if self._starting and self._target() != self.run_id:
            self._starting.cancel()

    def _be(self, state: "replica_pb2.ReplicaState.ValueType", detail: str = "") -> None:
        self.state, self.detail = state, detail
        (self._idle.set if state == replica_pb2.REPLICA_STATE_IDLE else self._idle.clear)()
        self._changed()

    async def _start(self, assignment: Assignment) -> float | None:
        """Start the run. Returns the seconds after which to try again, None when that isn't needed."""
        self.run_id = assignment.run_id
        self._paused = False
        self._be(replica_pb2.REPLICA_STATE_STARTING)
        _log.info("starting run %s", self.run_id)
        self._starting = asyncio.create_task(self._start_run(assignment))
        try:
            await asyncio.wait({self._starting})
            starting = self._starting
        finally:
            self._starting.cancel()
            self._starting = None
        if starting.cancelled():
            await self.stop()
            return None
        error = starting.exception()
        if error is None:
            self._attempts = 0
            self._be(replica_pb2.REPLICA_STATE_READY)
            _log.info("ready for run %s", self.run_id)
            return None
        self._attempts += 1
        delay = min(FIRST_RETRY_SECONDS * 2 ** (self._attempts - 1), LAST_RETRY_SECONDS)
        _log.error("run %s did not start (attempt %d): %s", self.run_id, self._attempts, error, exc_info=error)
        await self._clean_up(STOP_RUN_SECONDS)
        self._be(
            replica_pb2.REPLICA_STATE_FAILED,
            f"run {self.run_id} did not start: {type(error).__name__}: {error} (attempt {self._attempts}; "
            f"again in {delay:g} s)",
        )
        return delay

    async def _start_run(self, assignment: Assignment) -> None:
        try:
            config = RunConfig.model_validate_json(assignment.config_json)
        except pydantic.ValidationError as error:
            raise InvalidArgument.from_validation(error, "config_json") from error
        await self._service.start_run(config, assignment)

    async def _follow_pause(self) -> None:
        paused = self._wanted.state == coordinator_pb2.RUN_STATE_PAUSED
        if paused != self._paused:
            _log.info("run %s is %s", self.run_id, "paused" if paused else "resumed")
            self._paused = paused
            await (self._service.pause_run() if paused else self._service.resume_run())

    async def _clean_up(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._service.stop_run()
                await self._gpus.give_back()
        except Exception:
            # Whatever is left over, the replica has to go on: the next run, or the end of the process.
            _log.exception("stop_run of run %s failed", self.run_id)
