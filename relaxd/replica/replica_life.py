"""The life of a replica: register, heartbeat, follow the assignment, drain, end.

run_replica runs a ReplicaService:

- It starts the gRPC server, then registers. It waits for a coordinator that is away, at the start or later, and
  registers again with one that answers NOT_FOUND. Work goes on meanwhile.
- The assignment names the run to work on. A new run: stop_run of the old one, start_run of the new one. PAUSED and
  back: pause_run, resume_run. No run, or one that ended: stop_run. The status then has its idle_reason.
- A start_run that fails puts the replica in FAILED with the reason in status.detail. It is tried again after 1 s, 2 s,
  4 s ... at most 30 s, as long as the assignment stays: the cause may be a Redis that is still starting. After an
  InvalidArgument status.start_refused says that no other start would help.
- A drain, requested by call or by heartbeat, lasts until the replica is given another run, or until heartbeats that
  requested it no longer do.
- With settings.standby it is registered only from Replica.Join to Replica.Leave.
- After ReplicaContext.give_up the replica is FAILED, drains as on SIGTERM, and the process ends with code 1: its
  supervisor starts another one. The same happens when another replica got its GPUs while it was out of touch.
- Replica.Restart ends the process within RESTART_SECONDS, even if something hangs: held groups are handed back, no
  drain is awaited, and the exit code (relaxd.replica) marks it as no failure.
- SIGTERM or SIGINT: health says NOT_SERVING, the service drains within grace_seconds, the process ends with code 0. A
  second signal ends it at once, with code 1.
"""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from relaxd import PROTOCOL_VERSION, __version__, telemetry
from relaxd.replica import RESTART
from relaxd.replica.assignment import AssignmentFollower
from relaxd.replica.gpus import gpu_gauges
from relaxd.replica.membership import Membership, Refused
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ReplicaServicer, ServiceStatus
from relaxd.rpc.errors import FailedPrecondition, ResourceExhausted, ServerError
from relaxd.rpc.server import RunningServer, Service, start_service
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import replica_pb2, replica_pb2_grpc
from relaxd.v1.coordinator_pb2 import HeartbeatResponse, Registration
from relaxd.waiting import waits

WAIT_SECONDS = 2.0
"""Minimum length of a wait that a replica's status mentions, in seconds."""
RESTART_SECONDS = 5.0
"""Maximum seconds from a request to restart until the process has ended."""

_log = logging.getLogger(__name__)


class _Life:
    """Connects the parts of a replica's process: service, server, assignment, GPU leases and registration."""

    def __init__(self, service: ReplicaService, context: ReplicaContext) -> None:
        self.service = service
        self.context = context
        self.settings = context.settings
        self.gpus = context.gpus
        self.fence = context.fence
        self.started_at = time.monotonic()
        self.follower = AssignmentFollower(service, self.send_status, context.gpus)
        self.server: RunningServer | None = None
        self.membership: Membership | None = None
        self.ending = False
        self.restarting = asyncio.Event()
        """Event that is set when the process has to end so that its supervisor restarts it."""
        self.joined, self.left = asyncio.Event(), asyncio.Event()
        if not self.settings.standby:
            self.joined.set()
        self._told_to_drain = False
        """True if the last heartbeat's answer requested a drain."""
        self._drains: set[asyncio.Task[int]] = set()

    def status(self) -> replica_pb2.ReplicaStatus:
        """Return the replica's status: that of the service, with the replica's run, drain, waits and GPUs."""
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
        if self.context.failure:
            state = replica_pb2.REPLICA_STATE_FAILED
        detail = self.context.failure or follower.detail or follower.idle_reason
        refused = not self.context.failure and (follower.start_refused or own.start_refused)
        wait = replica_pb2.REPLICA_WAIT_UNSPECIFIED
        if not detail:
            wait = replica_pb2.REPLICA_WAIT_GPUS if self.gpus.waiting else own.wait
            detail = self.gpus.waiting or own.detail or _longest_wait()
        return replica_pb2.ReplicaStatus(
            replica_id=self.settings.replica_id,
            role=self.service.role,
            state=state,
            run_id=follower.run_id,
            detail=detail,
            wait=wait,
            start_refused=refused and state == replica_pb2.REPLICA_STATE_FAILED,
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
            user_messages=self.context.user_messages.current(),
        )

    def restart(self, replica_id: str, reason: str) -> None:
        """End the process so that its supervisor restarts it. Raises FailedPrecondition."""
        if replica_id != self.settings.replica_id:
            raise FailedPrecondition(
                f"replica_id is {replica_id!r}, but this process is {self.settings.replica_id}",
                reason="ANOTHER_REPLICA",
                subject=self.settings.replica_id,
            )
        if not self.settings.instance:
            raise FailedPrecondition(
                f"nobody would start {replica_id} again: it has no --instance / RELAXD_INSTANCE. Restart it by hand"
            )
        if self.restarting.is_set():
            return
        _log.error("told to restart: %s", reason or "no reason given")
        # If the process hangs, its orderly end may hang, too.
        last_resort = threading.Timer(RESTART_SECONDS, os._exit, (RESTART,))
        last_resort.daemon = True
        last_resort.start()
        self.restarting.set()

    def send_status(self) -> None:
        """Have a heartbeat with the replica's status sent at once."""
        if self.membership:
            self.membership.send_now.set()

    async def on_registered(self) -> None:
        """Lease the held GPUs again after a registration. End the process if another replica has them now."""
        try:
            await self.gpus.confirm()
        except ResourceExhausted as error:
            self.context.give_up(f"other replicas got the GPUs while this one was out of touch: {error}")

    async def on_answer(self, answer: HeartbeatResponse) -> None:
        """Apply the coordinator's answer to a heartbeat: its term, the assignment, and the start or end of a drain."""
        self.fence.newest = answer.term
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
            return  # it has left already
        await self.follower.drain(seconds)
        self.joined.clear()
        self.left.set()
        await self.follower.dismiss()
        self._told_to_drain = False
        self.fence.newest = 0  # no heartbeats will tell of terms that begin anew
        if self.server and not self.ending:
            await self.server.set_serving(False)

    async def keep_registered(self) -> None:
        """Keep the replica registered; in standby only from each call of Replica.Join to Replica.Leave. Raises
        Refused."""
        assert self.membership
        while True:
            await self.joined.wait()  # idle: nobody has asked it to join
            self.left.clear()
            membership = asyncio.create_task(self.membership.run())
            left = asyncio.create_task(self.left.wait())  # idle: it is registered
            try:
                await asyncio.wait({membership, left}, return_when=asyncio.FIRST_COMPLETED)  # idle: it is registered
                if membership.done():
                    membership.result()
            finally:
                for task in (membership, left):
                    task.cancel()
                await asyncio.gather(membership, left, return_exceptions=True)

    def start_membership(self, server: RunningServer) -> None:
        """Create the replica's registration, for which the server's port is needed."""
        self.server = server
        registration = Registration(
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
            self.context.coordinator,
            self.settings.coordinator,
            registration,
            status=self.status,
            on_answer=self.on_answer,
            on_registered=self.on_registered,
            on_contact=self.gpus.on_contact,
            engine_ranks=lambda: self.service.engine_ranks,
            tls=self.settings.tls,
        )


async def run_replica(
    service: ReplicaService,
    context: ReplicaContext,
    services: Sequence[tuple[Callable[[Any, Any], None], Any, str]] = (),
) -> None:
    """Run a replica until a signal or its coordinator ends it; returns after a drain.

    Args:
        service: the service.
        context: the process of the service.
        services: gRPC services to serve besides relaxd.v1.Replica: (add function, servicer, full name).

    Raises SystemExit(1), after logging the reason, when the port is taken, the coordinator refuses this replica
    (another protocol version, a wrong token), or the service gave up; SystemExit(exit_codes.RESTART) when the process
    has to restart.
    """
    settings = context.settings
    life = _Life(service, context)
    servicer = ReplicaServicer(
        life.status,
        life.follower.drain,
        life if settings.standby else None,
        life.restart,
        deadline_seconds=settings.deadline_seconds,
    )
    own = Service(replica_pb2_grpc.add_ReplicaServicer_to_server, servicer, "relaxd.v1.Replica")
    try:
        server = await start_service(
            [own, *services],
            settings,
            fence=life.fence,
            max_connection_age_seconds=service.max_connection_age_seconds,
        )
    except ServerError as error:
        _log.error("%s", error)
        raise SystemExit(1) from None
    life.start_membership(server)
    _log.info("listening on %s:%d", settings.host, server.port)
    ends = [asyncio.create_task(event.wait()) for event in (context.stop, context.failed, life.restarting)]
    following = asyncio.create_task(life.follower.run())
    registering = asyncio.create_task(life.keep_registered())
    try:
        await asyncio.wait({*ends, following, registering}, return_when=asyncio.FIRST_COMPLETED)
        for task in (following, registering):
            if task.done():
                task.result()
    except Refused as error:
        _log.error("%s", error)
        raise SystemExit(1) from None
    finally:
        await _end(life, server, following, registering)
        for end in ends:
            end.cancel()
    if life.restarting.is_set():
        raise SystemExit(RESTART)
    if context.failure:
        raise SystemExit(1)


async def _end(
    life: _Life, server: RunningServer, following: asyncio.Task[None], registering: asyncio.Task[None]
) -> None:
    """Drain the replica (unless it restarts), stop its run and its server, all within the grace period."""
    loop = asyncio.get_running_loop()
    restarting = life.restarting.is_set()
    grace = min(life.settings.grace_seconds, RESTART_SECONDS) if restarting else life.settings.grace_seconds
    end = loop.time() + grace
    life.ending = True
    await server.set_serving(False)
    # The rest of the grace period is for stopping the run and the server.
    if not restarting and (held := await life.follower.drain(grace - min(2.0, grace / 4))):
        _log.warning("still holding %d groups after %g s: other replicas get them when their lease ends", held, grace)
    for task in (following, registering):
        task.cancel()
    await asyncio.wait({following, registering})
    # Tell the coordinator that it failed or was stopped on purpose, so that nobody waits for it to come back.
    if (life.context.failure or not restarting) and life.membership and life.joined.is_set():
        await life.membership.send_last_status()
    await life.follower.stop(max(0.5, end - loop.time()))
    await server.stop(max(0.0, min(1.0, end - loop.time())))
    await asyncio.to_thread(telemetry.shutdown)
    _log.info("ended")


def _longest_wait() -> str:
    """Describe this process's longest wait; "" if none lasts WAIT_SECONDS yet."""
    found = waits(min_seconds=WAIT_SECONDS)
    return f"waiting for {found[0]}" if found else ""


def advertised_address(settings: ServiceSettings, port: int) -> str:
    """Return the host:port at which other services reach this process.

    That is settings.advertise, else the address it listens on, else (when it listens on all addresses) the address
    from which it reaches the coordinator.
    """
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
