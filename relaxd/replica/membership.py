"""Keeps a replica registered with the coordinator, and sends heartbeats, through outages and restarts."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import grpc

from relaxd.rpc.errors import explain
from relaxd.rpc.tls import TlsFiles, connection_hint
from relaxd.v1.coordinator_pb2 import HeartbeatRequest, HeartbeatResponse, RegisterRequest, Registration
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import ReplicaStatus
from relaxd.waiting import waiting

CALL_SECONDS = 5.0
"""Deadline of a registration or a heartbeat, in seconds."""
RETRY_SECONDS = 0.5
"""Seconds between two attempts to reach the coordinator while it is away."""
STARTING_SECONDS = 10.0
"""Seconds after this process's start in which an unresponsive coordinator causes no warning, because it may
be starting, too."""
TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
"""Status codes of a registration or heartbeat after which another attempt may succeed."""

_log = logging.getLogger(__name__)


class Refused(Exception):
    """The coordinator refuses this replica for good; the message has the reason."""


class Membership:
    """Keeps a replica registered with the coordinator, and sends its heartbeats.

    Args:
        coordinator: stub of the coordinator.
        address: the coordinator's address, for messages.
        registration: registration to send.
        status: returns the status to report in heartbeats.
        on_answer: called with every answer; a registration's answer is converted to a heartbeat's.
        on_registered: called after each registration, before `on_answer`.
        on_contact: called when a registration or heartbeat was answered, with the monotonic time at which it was sent
            and the duration of the GPU lease in seconds.
        engine_ranks: returns the engine's ranks; when they change, the replica registers again.
        tls: TLS files of the stub's channel, for messages.
    """

    def __init__(
        self,
        coordinator: CoordinatorStub,
        address: str,
        registration: Registration,
        *,
        status: Callable[[], ReplicaStatus],
        on_answer: Callable[[HeartbeatResponse], Awaitable[None]],
        on_registered: Callable[[], Awaitable[None]],
        on_contact: Callable[[float, float], None],
        engine_ranks: Callable[[], int],
        tls: TlsFiles,
    ) -> None:
        self._coordinator = coordinator
        self._address = address
        self._registration = registration
        self._status = status
        self._on_answer = on_answer
        self._on_registered = on_registered
        self._on_contact = on_contact
        self._engine_ranks = engine_ranks
        self._tls = tls
        self.send_now = asyncio.Event()
        """Event to set so that the next heartbeat is sent at once."""
        self._away = False
        self._warns_from = time.monotonic() + STARTING_SECONDS
        """Monotonic time before which an unresponsive coordinator causes no warning."""
        self._heartbeat_seconds = 1.0

    @property
    def launch_id(self) -> str:
        """Launch id that the next registration sends; empty if no scale request launched the replica."""
        return self._registration.launch_id

    @launch_id.setter
    def launch_id(self, launch_id: str) -> None:
        self._registration.launch_id = launch_id

    async def run(self) -> None:
        """Register the replica and send heartbeats until cancelled. Raises Refused."""
        while True:
            with waiting(f"the coordinator at {self._address} to register this process"):
                await self._register()
            while await self._heartbeat():
                await self._pause(self._heartbeat_seconds)

    async def _register(self) -> None:
        while True:
            self._registration.engine_ranks = self._engine_ranks()
            sent = time.monotonic()
            try:
                request = RegisterRequest(registration=self._registration)
                answer = await self._coordinator.Register(request, timeout=CALL_SECONDS)
                self._on_contact(sent, answer.gpu_lease_seconds)
                await self._on_registered()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (*TRANSIENT, grpc.StatusCode.NOT_FOUND):
                    raise Refused(
                        f"the coordinator at {self._address} refuses {self._registration.replica_id}: {explain(error)}"
                    ) from error
                await self._note_away(error)
                await asyncio.sleep(RETRY_SECONDS)  # named: by `run`
                continue
            self._away = False
            self._warns_from = 0.0
            self._heartbeat_seconds = answer.heartbeat_seconds or 1.0
            _log.info("registered with the coordinator at %s", self._address)
            await self._on_answer(HeartbeatResponse(assignment=answer.assignment, term=answer.term))
            return

    async def send_last_status(self) -> None:
        """Report the replica's status to the coordinator a last time, without retrying."""
        request = HeartbeatRequest(replica_id=self._registration.replica_id, status=self._status())
        try:
            await self._coordinator.Heartbeat(request, timeout=1.0)
        except grpc.aio.AioRpcError as error:
            _log.info("the last status did not reach the coordinator at %s: %s", self._address, explain(error))

    async def _heartbeat(self) -> bool:
        """Send one heartbeat to the coordinator. Returns False if the replica has to register again."""
        if self._engine_ranks() != self._registration.engine_ranks:
            return False  # the coordinator counts an engine's ranks in weight groups by its registration
        self.send_now.clear()
        request = HeartbeatRequest(replica_id=self._registration.replica_id, status=self._status())
        sent = time.monotonic()
        try:
            answer = await self._coordinator.Heartbeat(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                _log.info("the coordinator at %s does not know this replica: registering again", self._address)
                return False
            if error.code() not in TRANSIENT:
                raise Refused(
                    f"the coordinator at {self._address} refuses {request.replica_id}'s heartbeat: {explain(error)}"
                ) from error
            await self._note_away(error)
            return True
        self._on_contact(sent, answer.gpu_lease_seconds)
        if self._away:
            self._away = False
            _log.info("the coordinator at %s is back", self._address)
        await self._on_answer(answer)
        return True

    async def _pause(self, seconds: float) -> None:
        if self._away:
            # Changes of status must not cause a burst of calls while the coordinator is away.
            await asyncio.sleep(min(seconds, RETRY_SECONDS))
            return
        try:
            async with asyncio.timeout(seconds):
                await self.send_now.wait()
        except TimeoutError:
            pass

    async def _note_away(self, error: grpc.aio.AioRpcError) -> None:
        if self._away or time.monotonic() < self._warns_from:
            return
        self._away = True
        why = explain(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            hint = await asyncio.to_thread(connection_hint, self._address, error.details() or "", self._tls)
            why = f"{hint} ({why})" if hint else why
        _log.warning("the coordinator at %s does not answer, retrying: %s", self._address, why)
