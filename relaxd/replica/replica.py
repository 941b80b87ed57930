"""The life of a service that is not the coordinator: register, heartbeat, follow the assignment, drain, end.

A service implements ReplicaService; run_replica does the rest:

- It starts the gRPC server, then registers. A coordinator that is away, at the start or later, is waited for; one that
  forgot this replica (NOT_FOUND) is registered with again. Work goes on meanwhile.
- The assignment says which run to work on. A new run: stop_run of the old one, start_run of the new one. PAUSED and
  back: pause_run, resume_run. No run, or one that ended: stop_run.
- A start_run that fails puts the replica in FAILED with the reason in status.detail and is tried again, after 1 s, 2 s,
  4 s ... at most 30 s, as long as the assignment stays: what failed may be a Redis that is just starting.
- A drain that is asked for by call or by heartbeat lasts until the replica is given another run, or until heartbeats
  that asked for it no longer do.
- With settings.standby it registers only when Replica.Join asks it to, and until Replica.Leave.
- A service that gives up (give_up) is FAILED, drains as on SIGTERM, and the process ends with code 1: whoever
  supervises it starts another. So does a replica whose GPUs another one got while it was out of touch.
- Replica.Restart ends the process within RESTART_SECONDS, whatever hangs in it: what is held is handed back, no drain
  awaited, and the exit code (relaxd.replica.exit_codes) says that it is no failure.
- SIGTERM or SIGINT: health says NOT_SERVING, the service drains within grace_seconds, the process ends with code 0. A
  second signal ends it at once, with code 1.
"""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from relaxd import PROTOCOL_VERSION, __version__, telemetry
from relaxd.process.child import Child
from relaxd.replica.assignment import AssignmentFollower
from relaxd.replica.exit_codes import RESTART
from relaxd.replica.gpus import GpuLeases, gpu_gauges, visible_gpus
from relaxd.replica.membership import Membership, Refused
from relaxd.replica.service import ReplicaService, ServiceStatus
from relaxd.replica.turns import wait_for_turn
from relaxd.rpc.client import channel
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, ServerError
from relaxd.rpc.server import RunningServer, Service, start_service
from relaxd.rpc.settings import ServiceSettings
from relaxd.rpc.signals import stop_signals
from relaxd.telemetry import setup_logging
from relaxd.v1 import replica_pb2, replica_pb2_grpc
from relaxd.v1.coordinator_pb2 import HeartbeatResponse, RegisterRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub

__all__ = ["ReplicaService", "ReplicaServicer", "ServiceStatus", "run_replica"]

MAX_LAUNCH_ID = 300
ANSWER_SECONDS = 0.5
"""Drain answers this long before its caller's deadline."""
RESTART_SECONDS = 5.0
"""A process that was told to restart is gone after this."""

_log = logging.getLogger(__name__)


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """relaxd.v1.Replica over functions: what the status is, how to drain within some seconds, (where this process waits
    to be asked) how to join under a name and leave it within some seconds, and how to restart, with an id and a
    reason."""

    def __init__(
        self,
        status: Callable[[], replica_pb2.GetStatusResponse],
        drain: Callable[[float], Awaitable[int]],
        standby: tuple[Callable[[str], None], Callable[[str, float], Awaitable[None]]] | None = None,
        restart: Callable[[str, str], None] | None = None,
        *,
        deadline_seconds: float,
    ) -> None:
        self._status, self._drain, self._standby, self._restart = status, drain, standby, restart
        self._deadline_seconds = deadline_seconds

    async def GetStatus(self, request: replica_pb2.GetStatusRequest, context: Any) -> replica_pb2.GetStatusResponse:
        """See the proto."""
        return self._status()

    async def Drain(self, request: replica_pb2.DrainRequest, context: Any) -> replica_pb2.DrainResponse:
        """See the proto."""
        return replica_pb2.DrainResponse(held_groups=await self._drain(_seconds_left(context, self._deadline_seconds)))

    async def Join(self, request: replica_pb2.JoinRequest, context: Any) -> replica_pb2.JoinResponse:
        """See the proto."""
        join, _ = self._asked()
        if len(request.launch_id) > MAX_LAUNCH_ID:
            # The coordinator would refuse it, and a replica that is refused ends.
            problem = f"has {len(request.launch_id)} characters: at most {MAX_LAUNCH_ID} are allowed"
            raise InvalidArgument(f"launch_id {problem}", [("launch_id", problem)])
        join(request.launch_id)
        status = self._status()
        return replica_pb2.JoinResponse(replica_id=status.replica_id, role=status.role)

    async def Leave(self, request: replica_pb2.LeaveRequest, context: Any) -> replica_pb2.LeaveResponse:
        """See the proto."""
        await self._asked()[1](request.launch_id, _seconds_left(context, self._deadline_seconds))
        return replica_pb2.LeaveResponse()

    async def Restart(self, request: replica_pb2.RestartRequest, context: Any) -> replica_pb2.RestartResponse:
        """See the proto."""
        if self._restart is None:
            raise FailedPrecondition("this process is restarted where it was started")
        self._restart(request.replica_id, request.reason)
        return replica_pb2.RestartResponse()

    def _asked(self) -> tuple[Callable[[str], None], Callable[[str, float], Awaitable[None]]]:
        if self._standby is None:
            raise FailedPrecondition("this process registers by itself: only one started with --standby can be asked")
        return self._standby


def _seconds_left(context: Any, deadline_seconds: float) -> float:
    """How long a call may work, given its deadline, or that of calls without one."""
    remaining = context.time_remaining()
    return max(0.0, (deadline_seconds if remaining is None else remaining) - ANSWER_SECONDS)


class _Life:
    """Ties a service, its server, its assignment and its membership together."""

    def __init__(
        self, service: ReplicaService, settings: ServiceSettings, gpus: GpuLeases, coordinator: CoordinatorStub
    ) -> None:
        self.service = service
        self.settings = settings
        self.gpus = gpus
        self.started_at = time.monotonic()
        self.follower = AssignmentFollower(service, self.changed, gpus)
        self.server: RunningServer | None = None
        self.membership: Membership | None = None
        self.ending = False
        self.broken = ""
        """Why the service has given up."""
        self.restarting = False
        """Whether it was told to restart."""
        self.gave_up = asyncio.Event()
        self.joined, self.left = asyncio.Event(), asyncio.Event()
        if not settings.standby:
            self.joined.set()
        self._told_to_drain = False
        self._coordinator = coordinator
        self._drains: set[asyncio.Task[int]] = set()
        self._loop = asyncio.get_running_loop()
        service.lease_gpus, service.give_up = gpus.lease, self.give_up
        gpus.on_lost = self.follower.begin_again
        Child.gpu_lease = gpus.lease_of_children
        service.take_turn = partial(wait_for_turn, coordinator, settings.replica_id)

    def status(self) -> replica_pb2.GetStatusResponse:
        follower = self.follower
        try:
            own = self.service.status()
        except Exception as error:
            _log.exception("status of the service failed")
            own = ServiceStatus(
                state=replica_pb2.REPLICA_STATE_FAILED, detail=f"status failed: {type(error).__name__}: {error}"
            )
        state: replica_pb2.ReplicaState.ValueType = follower.state
        if state == replica_pb2.REPLICA_STATE_READY:
            state = own.state or state
        if follower.draining or self.ending:
            state = replica_pb2.REPLICA_STATE_DRAINING
        if self.broken:
            state = replica_pb2.REPLICA_STATE_FAILED
        return replica_pb2.GetStatusResponse(
            replica_id=self.settings.replica_id,
            role=self.service.role,
            state=state,
            run_id=follower.run_id,
            detail=self.broken or follower.detail or self.gpus.waiting or own.detail,
            held_groups=own.held_groups,
            done_groups=own.done_groups,
            weights=own.weights,
            uptime_seconds=time.monotonic() - self.started_at,
            package_version=__version__,
            protocol_version=PROTOCOL_VERSION,
            gauges={**own.gauges, **gpu_gauges(self.gpus.held)},
            gpu_uuids=[gpu.uuid for gpu in self.gpus.held],
            progress=own.progress,
            awake=own.awake,
        )

    def give_up(self, reason: str) -> None:
        _log.error("giving up: %s", reason)
        self.broken = self.broken or reason
        self._loop.call_soon_threadsafe(self.gave_up.set)

    def restart(self, replica_id: str, reason: str) -> None:
        if replica_id != self.settings.replica_id:
            raise FailedPrecondition(f"replica_id is {replica_id!r}, but this process is {self.settings.replica_id}")
        if not self.settings.instance:
            raise FailedPrecondition(
                f"nobody would start {replica_id} again: it has no --instance / RELAXD_INSTANCE. Restart it by hand"
            )
        if self.restarting:
            return
        _log.error("told to restart: %s", reason or "no reason given")
        # Whatever it is stuck in may hold up its end, too.
        last_resort = threading.Timer(RESTART_SECONDS, os._exit, (RESTART,))
        last_resort.daemon = True
        last_resort.start()
        self.restarting = True
        self.gave_up.set()

    def changed(self) -> None:
        if self.membership:
            self.membership.tell_soon()

    async def registered(self) -> None:
        try:
            await self.gpus.confirm()
        except ResourceExhausted as error:
            self.give_up(f"the GPUs went to others while the coordinator did not hear of this replica: {error}")

    async def heard(self, answer: HeartbeatResponse) -> None:
        await self.gpus.settle()
        begin = answer.drain and not self.follower.draining
        self.follower.assign(answer.assignment, answer.drain)
        if begin:
            seconds = answer.drain_seconds if answer.HasField("drain_seconds") else self.settings.grace_seconds
            task = asyncio.create_task(self.follower.drain(seconds))
            self._drains.add(task)
            task.add_done_callback(self._drains.discard)
        elif self._told_to_drain and not answer.drain:
            self.follower.undrain()
        self._told_to_drain = answer.drain
        if self.server and not self.ending and self.server.serving == self.follower.draining:
            await self.server.set_serving(not self.follower.draining)

    def join(self, launch_id: str) -> None:
        assert self.membership
        if self.joined.is_set() and self.membership.launch_id != launch_id:
            raise FailedPrecondition(f"it has joined already, as {self.membership.launch_id!r}")
        self.membership.launch_id = launch_id
        self.joined.set()

    async def leave(self, launch_id: str, seconds: float) -> None:
        assert self.membership
        if not self.joined.is_set() or self.membership.launch_id != launch_id:
            return  # it has left
        await self.follower.drain(seconds)
        self.joined.clear()
        self.left.set()
        await self.follower.dismiss()
        self._told_to_drain = False
        if self.server and not self.ending:
            await self.server.set_serving(False)

    async def belong(self) -> None:
        """Be registered, from Join to Leave. Raises Refused."""
        assert self.membership
        while True:
            await self.joined.wait()
            self.left.clear()
            membership = asyncio.create_task(self.membership.run())
            left = asyncio.create_task(self.left.wait())
            try:
                await asyncio.wait({membership, left}, return_when=asyncio.FIRST_COMPLETED)
                if membership.done():
                    membership.result()
            finally:
                for task in (membership, left):
                    task.cancel()
                await asyncio.gather(membership, left, return_exceptions=True)

    def begin(self, server: RunningServer) -> None:
        self.server = server
        registration = RegisterRequest(
            replica_id=self.settings.replica_id,
            role=self.service.role,
            address=advertised_address(self.settings, server.port),
            protocol_version=PROTOCOL_VERSION,
            package_version=__version__,
            gpu_uuids=[gpu.uuid for gpu in self.gpus.visible],
            launch_id=self.settings.launch_id,
            instance=self.settings.instance,
        )
        self.membership = Membership(
            self._coordinator,
            self.settings.coordinator,
            registration,
            self.status,
            self.heard,
            self.registered,
            self.gpus.heartbeat_answered,
            lambda: self.service.engine_ranks,
            self.settings.tls,
        )


async def run_replica(
    service: ReplicaService,
    settings: ServiceSettings,
    services: Sequence[tuple[Callable[[Any, Any], None], Any, str]] = (),
) -> None:
    """Live the whole life of a replica; returns after a drain.

    Args:
        service: the service.
        settings: of this process.
        services: gRPC services to serve besides relaxd.v1.Replica: (add function, servicer, full name).

    Sets up logging and telemetry. Raises SystemExit(1), the reason being logged, when the port is taken, the
    coordinator refuses this replica (another protocol version, a wrong token), or the service has given up; with
    exit_codes.RESTART when the process was told to restart.
    """
    setup_logging(settings.replica_id, settings.log_level)
    telemetry.setup(settings.role, settings.replica_id)
    stop = stop_signals()
    async with channel(settings.coordinator, token=settings.token, tls=settings.tls) as to_coordinator:
        coordinator = CoordinatorStub(to_coordinator)
        gpus = GpuLeases(settings.replica_id, await asyncio.to_thread(visible_gpus), coordinator)
        life = _Life(service, settings, gpus, coordinator)
        own = Service(
            replica_pb2_grpc.add_ReplicaServicer_to_server,
            ReplicaServicer(
                life.status,
                life.follower.drain,
                (life.join, life.leave) if settings.standby else None,
                life.restart,
                deadline_seconds=settings.deadline_seconds,
            ),
            "relaxd.v1.Replica",
        )
        try:
            server = await start_service(
                [own, *services], settings, max_connection_age_seconds=service.max_connection_age_seconds
            )
        except ServerError as error:
            _log.error("%s", error)
            raise SystemExit(1) from None
        life.begin(server)
        _log.info("listening on %s:%d", settings.host, server.port)
        stopping = asyncio.create_task(stop.wait())
        giving_up = asyncio.create_task(life.gave_up.wait())
        following = asyncio.create_task(life.follower.run())
        belonging = asyncio.create_task(life.belong())
        try:
            await asyncio.wait({stopping, giving_up, following, belonging}, return_when=asyncio.FIRST_COMPLETED)
            for task in (following, belonging):
                if task.done():
                    task.result()
        except Refused as error:
            _log.error("%s", error)
            raise SystemExit(1) from None
        finally:
            await _end(life, server, following, belonging)
            stopping.cancel()
            giving_up.cancel()
    if life.restarting:
        raise SystemExit(RESTART)
    if life.broken:
        raise SystemExit(1)


async def _end(
    life: _Life, server: RunningServer, following: asyncio.Task[None], belonging: asyncio.Task[None]
) -> None:
    """Drain (not when told to restart), stop the run, stop the server: all within the grace period."""
    loop = asyncio.get_running_loop()
    grace = min(life.settings.grace_seconds, RESTART_SECONDS) if life.restarting else life.settings.grace_seconds
    end = loop.time() + grace
    life.ending = True
    await server.set_serving(False)
    # Some of the grace is kept for stopping the run and the server once nothing, or too much, is held.
    if not life.restarting and (held := await life.follower.drain(grace - min(2.0, grace / 4))):
        _log.warning("still holding %d groups after %g s: others get them when their lease ends", held, grace)
    for task in (following, belonging):
        task.cancel()
    await asyncio.wait({following, belonging})
    # That it failed, or else that it goes of its own accord: nobody has to bring it back.
    if (life.broken or not life.restarting) and life.membership and life.joined.is_set():
        await life.membership.last_word()
    await life.follower.stop(max(0.5, end - loop.time()))
    await server.stop(max(0.0, min(1.0, end - loop.time())))
    await asyncio.to_thread(telemetry.shutdown)
    _log.info("ended")


def advertised_address(settings: ServiceSettings, port: int) -> str:
    """host:port under which others reach this process: as told, else the address it listens on, else (when it listens
    on all of them) the one from which it reaches the coordinator."""
    if settings.advertise:
        return settings.advertise
    if settings.host not in ("0.0.0.0", "::", "[::]", ""):
        return f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"
    host, _, coordinator_port = settings.coordinator.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing: it only picks the route.
            probe.connect((host, int(coordinator_port)))
            return f"{probe.getsockname()[0]}:{port}"
    except OSError:
        return f"{socket.gethostname()}:{port}"
