"""A replica's service: the interface that `relaxd.replica.replica_life.run_replica` runs, its access to the process
(settings, coordinator, leases and turns on the GPUs, shutdown), and the server of relaxd.v1.Replica, which every
replica has, with a check of the order of weight synchronisations."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import grpc

from relaxd import telemetry
from relaxd.alerts.user_messages import RecentMessages
from relaxd.config import RunConfig
from relaxd.process.upkeep import stop_signals
from relaxd.replica.gpus import GpuLeases, visible_gpus
from relaxd.rpc.client import channel
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument, explain
from relaxd.rpc.leader_term import NewestTerm
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.telemetry import setup_logging
from relaxd.v1 import replica_pb2, replica_pb2_grpc
from relaxd.v1.coordinator_pb2 import Assignment, TakeTurnRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.waiting import waiting

CALL_SECONDS = 5.0
ASK_AGAIN_SECONDS = 0.25
WARN_SECONDS = 10.0
"""Seconds between two warnings of a coordinator that doesn't answer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """A service's part of ReplicaStatus; run_replica adds the rest."""

    held_groups: int = 0
    """Groups held now; for an engine that agents use, its running requests."""
    done_groups: int = 0
    """Groups finished since the process started."""
    detail: str = ""
    """One sentence for people."""
    state: "replica_pb2.ReplicaState.ValueType | None" = None
    """STARTING, QUARANTINED or FAILED instead of READY. Ignored while run_replica itself knows the replica to be idle,
    starting, failed or draining."""
    weights: replica_pb2.WeightVersion | None = None
    """The weights that the service uses or has trained."""
    progress: int = 0
    """Counter of work done, in steps that never take long: see ReplicaStatus.progress."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Further measurements by name."""
    wait: "replica_pb2.ReplicaWait.ValueType" = replica_pb2.REPLICA_WAIT_UNSPECIFIED
    """Kind of the wait in `detail`, if any."""
    start_refused: bool = False
    """With the state FAILED: the settings or the model are wrong, so that another start would fail as well."""
    awake: bool = False
    """True if its children hold the device's memory, in a colocated run."""


class ReplicaService(ABC):
    """The role-specific part of a replica. The services take a `ReplicaContext` in their constructor.

    run_replica calls every method from one event loop, and never two of start_run, stop_run, pause_run, resume_run and
    drain at once (status and drain excepted).
    """

    role: str
    """Role that the replica registers with."""
    engine_ranks: int = 0
    """Ranks of its engine (rollout). When a run changes it, the replica registers again."""
    max_connection_age_seconds: ClassVar[float | None] = None
    """Age at which its server asks clients to reconnect: for services whose callers spread their calls over the
    replicas behind one name. None: never."""

    @abstractmethod
    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """Prepare for a run and start to work on it; the replica is STARTING until this returns, then READY.

        It is cancelled when the assignment changes or the process ends. An exception is reported as status.detail;
        InvalidArgument also as status.start_refused. In either case stop_run is called next.
        """

    @abstractmethod
    async def stop_run(self) -> None:
        """Release held work and everything from start_run, whether it completed or not."""

    @abstractmethod
    async def drain(self, seconds: float) -> int:
        """Take no new work, and finish or hand back held work within `seconds`. Returns the number still held.

        May be called again. Only the next start_run takes work again.
        """

    @abstractmethod
    def status(self) -> ServiceStatus:
        """Return the current status, without blocking."""

    @abstractmethod
    async def pause_run(self) -> None:
        """Take no new work until resume_run. Only called between start_run and stop_run."""

    @abstractmethod
    async def resume_run(self) -> None:
        """Take work again after pause_run."""


async def wait_for_turn(coordinator: CoordinatorStub, replica_id: str, on_wait: Callable[[str], None]) -> None:
    """Wait until the coordinator grants this replica the device. Call it while none of its children uses the device.

    `on_wait` is called with the reason before each further attempt. Waits without a deadline, also while the
    coordinator is away: cancel it when the run ends.
    """
    warned = 0.0
    with waiting("its turn on the device") as wait:
        while True:
            try:
                answer = await coordinator.TakeTurn(TakeTurnRequest(replica_id=replica_id), timeout=CALL_SECONDS)
                if answer.granted:
                    return
                wait.reason = f"its turn on the device: {answer.reason}"
            except grpc.aio.AioRpcError as error:
                wait.reason = f"its turn on the device: the coordinator does not answer: {explain(error)}"
                if time.monotonic() - warned > WARN_SECONDS:
                    warned = time.monotonic()
                    logger.warning("waiting for %s", wait.reason)
            on_wait(f"waiting for {wait.reason}")
            await asyncio.sleep(ASK_AGAIN_SECONDS)


class ReplicaContext:
    """The process of a service: settings, coordinator, GPUs and shutdown. Open one with `open_context`; lives in its
    event loop.

    Args:
        settings: settings of this process.
        coordinator: stub of the coordinator.
        gpus: GPUs that this process sees, and the leases on them.
        stop: set by the first SIGTERM or SIGINT.
    """

    def __init__(
        self, settings: ServiceSettings, coordinator: CoordinatorStub, gpus: GpuLeases, stop: asyncio.Event
    ) -> None:
        self.settings = settings
        self.coordinator = coordinator
        self.gpus = gpus
        self.stop = stop
        self.fence = NewestTerm()
        """The newest coordinator's term; calls with earlier terms are refused."""
        self.failure = ""
        """Reason of the first `give_up`; empty before it."""
        self.failed = asyncio.Event()
        """Set by `give_up`."""
        self.user_messages = RecentMessages()
        """Recent messages that users' code has sent with `relaxd.notify`."""
        self._loop = asyncio.get_running_loop()

    async def take_turn(self, on_wait: Callable[[str], None]) -> None:
        """Wait until this replica of a colocated run may start children. Call it while it has none.

        `on_wait` is called with the reason for each wait.
        """
        await wait_for_turn(self.coordinator, self.settings.replica_id, on_wait)

    def give_up(self, reason: str) -> None:
        """End this process with exit code 1, after handing back held groups. For failures that only a new process
        repairs.

        Its supervisor starts another one. Any thread may call this; only the first reason counts.
        """
        if not self.failure:
            logger.error("giving up: %s", reason)
            self.failure = reason
        self._loop.call_soon_threadsafe(self.failed.set)


@asynccontextmanager
async def open_context(settings: ServiceSettings) -> AsyncIterator[ReplicaContext]:
    """Set up logging, telemetry and signal handlers, find the GPUs, and open a channel to the coordinator.

    Call it in the main thread. The channel closes when the block is left.
    """
    setup_logging(settings.replica_id, settings.log_level)
    telemetry.setup(settings.role, settings.replica_id)
    stop = stop_signals()
    async with channel(
        settings.coordinator, token=settings.token, tls=settings.tls, stack=settings.stack
    ) as to_coordinator:
        coordinator = CoordinatorStub(to_coordinator)
        gpus = GpuLeases(settings.replica_id, await asyncio.to_thread(visible_gpus), coordinator)
        yield ReplicaContext(settings, coordinator, gpus, stop)


MAX_LAUNCH_ID = 300
"""Maximum length of a launch_id, in characters."""
REPLY_SECONDS = 0.5
"""Seconds before the caller's deadline at which Drain and Leave answer."""


class Standby(Protocol):
    """A replica that registers only on demand."""

    def join(self, launch_id: str) -> None:
        """Register under a launch id. Raises FailedPrecondition if it has joined under another one."""

    async def leave(self, launch_id: str, seconds: float) -> None:
        """Drain within `seconds` and unregister. Does nothing if it hasn't joined under this launch id."""


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """Answers relaxd.v1.Replica.

    Args:
        status: returns the status.
        drain: drains within the given seconds; returns the number of groups still held.
        standby: handles Join and Leave; None refuses them.
        restart: handles Restart, given replica id and reason; None refuses it.
        deadline_seconds: default deadline of calls.
    """

    def __init__(
        self,
        status: Callable[[], replica_pb2.ReplicaStatus],
        drain: Callable[[float], Awaitable[int]],
        standby: Standby | None = None,
        restart: Callable[[str, str], None] | None = None,
        *,
        deadline_seconds: float,
    ) -> None:
        self._status, self._drain, self._standby, self._restart = status, drain, standby, restart
        self._deadline_seconds = deadline_seconds

    async def GetStatus(self, request: replica_pb2.GetStatusRequest, context: Any) -> replica_pb2.GetStatusResponse:
        return replica_pb2.GetStatusResponse(status=self._status())

    async def Drain(self, request: replica_pb2.DrainRequest, context: Any) -> replica_pb2.DrainResponse:
        return replica_pb2.DrainResponse(held_groups=await self._drain(self._seconds_left(context)))

    async def Join(self, request: replica_pb2.JoinRequest, context: Any) -> replica_pb2.JoinResponse:
        standby = self._require_standby()
        if len(request.launch_id) > MAX_LAUNCH_ID:
            # The coordinator would refuse it, and a refused replica ends.
            problem = f"has {len(request.launch_id)} characters: at most {MAX_LAUNCH_ID} are allowed"
            raise InvalidArgument(f"launch_id {problem}", [("launch_id", problem)])
        standby.join(request.launch_id)
        status = self._status()
        return replica_pb2.JoinResponse(replica_id=status.replica_id, role=status.role)

    async def Leave(self, request: replica_pb2.LeaveRequest, context: Any) -> replica_pb2.LeaveResponse:
        await self._require_standby().leave(request.launch_id, self._seconds_left(context))
        return replica_pb2.LeaveResponse()

    async def Restart(self, request: replica_pb2.RestartRequest, context: Any) -> replica_pb2.RestartResponse:
        if self._restart is None:
            raise FailedPrecondition("this process is restarted where it was started")
        self._restart(request.replica_id, request.reason)
        return replica_pb2.RestartResponse()

    def _require_standby(self) -> Standby:
        if self._standby is None:
            raise FailedPrecondition("this process registers by itself: only one started with --standby can be asked")
        return self._standby

    def _seconds_left(self, context: Any) -> float:
        remaining = context.time_remaining()
        return max(0.0, (self._deadline_seconds if remaining is None else remaining) - REPLY_SECONDS)


MAX_SYNC_ID = 2**62
"""Maximum id. Real ids stay far below it; a larger id, sent by mistake, would block all later synchronisations."""


class SyncIds:
    """Refuses calls of a weight synchronisation after a call of a later one from the same coordinator.

    Ids ascend within a coordinator's term; a later one may begin with smaller ids, because its Redis may have lost the
    last one and its clock may have been set. Calls of earlier terms are refused before (`NewestTerm`). No id is
    compared with this machine's clock, which may be wrong by days.
    """

    def __init__(self, coordinator: NewestTerm | None = None) -> None:
        """`coordinator` holds the newest coordinator's term; None: there is only one coordinator."""
        self._coordinator = coordinator
        self._term = 0
        self._last = 0

    def take(self, sync_id: int) -> None:
        """Accept a call of this synchronisation.

        Raises FailedPrecondition when a later one was seen, InvalidArgument when the id is too large.
        """
        if sync_id > MAX_SYNC_ID:
            problem = f"is {sync_id}: it must be at most {MAX_SYNC_ID}"
            raise InvalidArgument(f"sync_id {problem}", [("sync_id", problem)])
        term = self._coordinator.newest if self._coordinator is not None else 0
        last = self._last if term == self._term else 0
        if sync_id < last:
            raise FailedPrecondition(f"sync_id is {sync_id}, but {last} was seen: it is over", reason="SYNC_SUPERSEDED")
        self._term, self._last = term, sync_id
