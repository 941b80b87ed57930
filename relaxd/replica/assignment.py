"""Follows the coordinator's assignment: starts, pauses, resumes and stops a replica's run."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import pydantic

from relaxd import telemetry
from relaxd.config import RunConfig
from relaxd.replica.gpus import GpuLeases
from relaxd.replica.replica_service import ReplicaService
from relaxd.rpc.errors import InvalidArgument, RpcError
from relaxd.v1 import coordinator_pb2, replica_pb2
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.waiting import Backoff

STOP_RUN_SECONDS = 60.0
"""Timeout of a service's stop_run, in seconds. After it the replica continues."""
BACKOFF = Backoff(first_seconds=1.0, max_seconds=30.0)
_ENDED = (coordinator_pb2.RUN_STATE_STOPPED, coordinator_pb2.RUN_STATE_FAILED)

_log = logging.getLogger(__name__)


class AssignmentFollower:
    """Starts, pauses, resumes and stops the service's run, as assigned. It does one of these at a time, in the task of
    `run`.

    `on_change` is called whenever `state` or `run_id` changes. Leases on GPUs are returned when a run has been stopped.
    A drained replica that holds GPUs leaves the run, so that others can lease them; a replica that lost its GPUs starts
    the run again.
    """

    def __init__(self, service: ReplicaService, on_change: Callable[[], None], gpus: GpuLeases) -> None:
        self.state: replica_pb2.ReplicaState.ValueType = replica_pb2.REPLICA_STATE_IDLE
        """State of the replica: IDLE, STARTING, READY or FAILED. `draining` is a separate field."""
        self.detail = ""
        self.start_refused = False
        """True while the service is FAILED with INVALID_ARGUMENT: another start would fail as well."""
        self.run_id = ""
        """Id of the run that has started, is starting or failed to start; empty for no run."""
        self.draining = False
        self._service = service
        self._on_change = on_change
        self._gpus = gpus
        gpus.on_lost = self.restart_run
        self._drained = self._restart = False
        self._late_drains: set[asyncio.Task[int]] = set()
        self._idle = asyncio.Event()
        self._wanted = Assignment()
        self._wake = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._paused = False
        self._attempts = 0

    def assign(self, assignment: Assignment, drain: bool = False) -> None:
        """Take over a new assignment, which the task of `run` carries out. A new or restarted run ends a drain unless
        `drain` is set."""
        if assignment == self._wanted:
            return
        before = self._wanted
        if (assignment.run_id, assignment.begin_time) != (before.run_id, before.begin_time):
            self.draining, self._drained = drain, False
            self._attempts = 0
            self._restart = self._restart or assignment.run_id == before.run_id
        self._wanted = assignment
        self._interrupt()

    @property
    def idle_reason(self) -> str:
        """Reason why the replica is idle although there is a run; empty if there is none."""
        return self._wanted.idle_reason

    async def drain(self, seconds: float) -> int:
        """Take no new work, and finish or hand back held groups. Returns the number of groups still held."""
        if not self.draining:
            self.draining = True
            self._interrupt()
            self._on_change()
        if self.state != replica_pb2.REPLICA_STATE_READY:
            return 0
        work = asyncio.create_task(self._service.drain(seconds), name="drain")
        done, _ = await asyncio.wait({work}, timeout=seconds)
        if not done:  # the caller waits no longer, and may not call again
            self._late_drains.add(work)
            work.add_done_callback(self._after_late_drain)
            return self._service.status().held_groups
        held = work.result()
        self._note_held(held)
        return held

    def _after_late_drain(self, work: "asyncio.Task[int]") -> None:
        self._late_drains.discard(work)
        if work.cancelled():  # the process ends
            return
        if (error := work.exception()) is not None:
            _log.error("the drain failed: %s", error)
        else:
            self._note_held(work.result())

    def _note_held(self, held: int) -> None:
        """Have the GPUs' leases returned if the replica is draining and holds no group any more."""
        if not held and self.draining and self._gpus.held:
            self._drained = True
            self._wake.set()

    def undrain(self) -> None:
        """End a drain, and start the run again."""
        if self.draining:
            self.draining = self._drained = False
            self._restart = True
            self._interrupt()
            self._on_change()

    def restart_run(self) -> None:
        """Have the task of `run` stop the run and start it again."""
        self._restart = True
        self._interrupt()

    async def dismiss(self) -> None:
        """Remove the assignment and end the drain. Returns once the run has been stopped."""
        self._wanted = Assignment()
        self.draining = self._drained = False
        self._interrupt()
        if self.state != replica_pb2.REPLICA_STATE_IDLE:
            await self._idle.wait()

    async def run(self) -> None:
        """Start, pause, resume and stop runs as assigned, until cancelled."""
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
                    await self._wake.wait()  # idle: the assignment stays
            except TimeoutError:
                pass

    async def stop(self, seconds: float = STOP_RUN_SECONDS) -> None:
        """Stop the service's run, if any, and set the replica's state to IDLE."""
        if self.state in (replica_pb2.REPLICA_STATE_STARTING, replica_pb2.REPLICA_STATE_READY):
            _log.info("leaving run %s", self.run_id)
            await self._stop_run(seconds)
        self.run_id = ""
        self._set_state(replica_pb2.REPLICA_STATE_IDLE)

    def _target(self) -> str:
        """Return the id of the run to work on; "" for no run. While a drain finishes held groups, this is still their
        run."""
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

    def _set_state(
        self, state: "replica_pb2.ReplicaState.ValueType", detail: str = "", *, start_refused: bool = False
    ) -> None:
        self.state, self.detail, self.start_refused = state, detail, start_refused
        (self._idle.set if state == replica_pb2.REPLICA_STATE_IDLE else self._idle.clear)()
        self._on_change()

    async def _start(self, assignment: Assignment) -> float | None:
        """Start the assigned run. Returns the seconds until the next attempt; None if no further attempt is needed."""
        self.run_id = assignment.run_id
        self._paused = False
        self._set_state(replica_pb2.REPLICA_STATE_STARTING)
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
            self._set_state(replica_pb2.REPLICA_STATE_READY)
            _log.info("ready for run %s", self.run_id)
            return None
        self._attempts += 1
        delay = BACKOFF.pause(self._attempts)
        _log.error("run %s did not start (attempt %d): %s", self.run_id, self._attempts, error, exc_info=error)
        await self._stop_run(STOP_RUN_SECONDS)
        self._set_state(
            replica_pb2.REPLICA_STATE_FAILED,
            f"run {self.run_id} did not start: {type(error).__name__}: {error} (attempt {self._attempts}; "
            f"again in {delay:g} s)",
            start_refused=isinstance(error, RpcError) and error.code is grpc.StatusCode.INVALID_ARGUMENT,
        )
        return delay

    async def _start_run(self, assignment: Assignment) -> None:
        try:
            config = RunConfig.model_validate_json(assignment.config_json)
        except pydantic.ValidationError as error:
            raise InvalidArgument.from_validation(error, "config_json") from error
        await asyncio.to_thread(telemetry.write_traces, config.trace_folder(assignment.folder))
        await self._service.start_run(config, assignment)

    async def _follow_pause(self) -> None:
        paused = self._wanted.state == coordinator_pb2.RUN_STATE_PAUSED
        if paused != self._paused:
            _log.info("run %s is %s", self.run_id, "paused" if paused else "resumed")
            self._paused = paused
            await (self._service.pause_run() if paused else self._service.resume_run())

    async def _stop_run(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._service.stop_run()
                await self._gpus.give_back()
                await asyncio.to_thread(telemetry.write_traces, None)
        except Exception:
            # The replica has to go on all the same: to the next run, or to the end of the process.
            _log.exception("stop_run of run %s failed", self.run_id)
