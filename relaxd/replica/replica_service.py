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
    """The part of a replica's status that the service reports; run_replica adds the rest of ReplicaStatus."""

    held_groups: int = 0
    """Number of groups that the service holds now; for an engine that agents use, the number of running requests."""
    done_groups: int = 0
    """Number of groups finished since the process started."""
    detail: str = ""
    """Details of the service's state, as one sentence for people."""
    state: "replica_pb2.ReplicaState.ValueType | None" = None
    """State of the service if it isn't READY: STARTING, QUARANTINED or FAILED. Ignored while run_replica itself knows
    the replica to be idle, starting, failed or draining."""
    weights: replica_pb2.WeightVersion | None = None
    """Version of the weights that the service uses or has trained; None if it has no weights."""
    progress: int = 0
    """Counter that grows while the service works, at short intervals (ReplicaStatus.progress)."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Further measurements of the service, by name."""
    wait: "replica_pb2.ReplicaWait.ValueType" = replica_pb2.REPLICA_WAIT_UNSPECIFIED
    """Kind of the wait that `detail` describes, if it describes one."""
    start_refused: bool = False
    """True if the state is FAILED because settings or the model are wrong, so that another start would fail as well."""
    awake: bool = False
    """True if, in a colocated run, the service's child processes hold the GPUs' memory."""


class ReplicaService(ABC):
    """The role-specific part of a replica. The constructor of a service takes a `ReplicaContext`.

    run_replica calls all methods from one event loop. It calls start_run, stop_run, pause_run and resume_run one at a
    time, and may call status and drain meanwhile.
    """

    role: str
    """Role with which the replica registers."""
    engine_ranks: int = 0
    """Number of ranks of a rollout replica's engine. When a run changes this number, the replica registers again."""
    max_connection_age_seconds: ClassVar[float | None] = None
    """Age in seconds of a connection at which the server asks the client to reconnect; None: never. For services whose
    callers spread their calls over the replicas behind one name."""

    @abstractmethod
    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """Prepare for a run and start to work on it; the replica is STARTING until this returns, then READY.

        The call is cancelled when the assignment changes or the process ends. An exception is reported as
        status.detail; InvalidArgument also as status.start_refused. In either case stop_run is called next.
        """

    @abstractmethod
    async def stop_run(self) -> None:
        """Release held work and everything that start_run created, even if start_run didn't complete."""

    @abstractmethod
    async def drain(self, seconds: float) -> int:
        """Take no new work, and finish or hand back held work within `seconds`. Returns the number of groups still
        held.

        May be called again. After a drain, the service takes work only after the next start_run.
        """

    @abstractmethod
    def status(self) -> ServiceStatus:
        """Return the service's current status, without blocking."""

    @abstractmethod
    async def pause_run(self) -> None:
        """Take no new work until resume_run. Only called between start_run and stop_run."""

    @abstractmethod
    async def resume_run(self) -> None:
        """Take new work again after pause_run."""


async def wait_for_turn(coordinator: CoordinatorStub, replica_id: str, on_wait: Callable[[str], None]) -> None:
    """Wait until it is this replica's turn on the GPUs of a colocated run. Call this while no child uses the GPUs.

    `on_wait` is called with the reason before each further attempt. Waits without a deadline, also while the
    coordinator is away: cancel the call when the run ends.
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
    """Process-wide objects that a service uses: settings, coordinator, GPUs and shutdown. Created by `open_context`,
    for one event loop.

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
        """Term of the newest coordinator. Calls with earlier terms are refused."""
        self.failure = ""
        """Reason of the first call of `give_up`; empty before that call."""
        self.failed = asyncio.Event()
        """Event that the first call of `give_up` sets."""
        self.user_messages = RecentMessages()
        """Recent messages that users' code has sent with `relaxd.notify`."""
        self._loop = asyncio.get_running_loop()

    async def take_turn(self, on_wait: Callable[[str], None]) -> None:
        """Wait until this replica of a colocated run may start children that use the GPUs. Call this while it has none.

        `on_wait` is called with the reason for each wait.
        """
        await wait_for_turn(self.coordinator, self.settings.replica_id, on_wait)

    def give_up(self, reason: str) -> None:
        """End this process with exit code 1, after handing back held groups. For failures that only a new process can
        repair.

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
"""Maximum length of a replica's launch id, in characters."""
REPLY_SECONDS = 0.5
"""Seconds before the caller's deadline at which Replica.Drain and Replica.Leave answer at the latest."""


class Standby(Protocol):
    """A replica in standby: it registers with the coordinator only on demand."""

    def join(self, launch_id: str) -> None:
        """Register the replica under a launch id. Raises FailedPrecondition if it has joined under another launch
        id."""

    async def leave(self, launch_id: str, seconds: float) -> None:
        """Drain the replica within `seconds`, and unregister it. Does nothing if it hasn't joined under this launch
        id."""


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """Implements the gRPC service relaxd.v1.Replica.

    Args:
        status: returns the replica's status.
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
"""Maximum id of a weight synchronisation. Real ids stay far below it; a larger id, sent by mistake, would block all
later synchronisations."""


class SyncIds:
    """Refuses calls of a weight synchronisation after the same coordinator has called for a later synchronisation.

    Ids ascend within a coordinator's term. A later term may begin with smaller ids, because the coordinator's Redis may
    have lost the last id and its clock may have been set. Calls of earlier terms are refused before (`NewestTerm`). No
    id is compared with this machine's clock, which may be wrong by days.
    """

    def __init__(self, coordinator: NewestTerm | None = None) -> None:
        """Create a check. `coordinator` has the newest coordinator's term; None: there is only one coordinator."""
        self._coordinator = coordinator
        self._term = 0
        self._last = 0

    def take(self, sync_id: int) -> None:
        """Accept a call of the weight synchronisation with this id.

        Raises FailedPrecondition when a later synchronisation was seen, InvalidArgument when the id is too large.
        """
        if sync_id > MAX_SYNC_ID:
            problem = f"is {sync_id}: it must be at most {MAX_SYNC_ID}"
            raise InvalidArgument(f"sync_id {problem}", [("sync_id", problem)])
        term = self._coordinator.newest if self._coordinator is not None else 0
        last = self._last if term == self._term else 0
        if sync_id < last:
            raise FailedPrecondition(f"sync_id is {sync_id}, but {last} was seen: it is over", reason="SYNC_SUPERSEDED")
        self._term, self._last = term, sync_id
