"""Being known to the coordinator: registration and heartbeats, through outages and restarts."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import grpc

from relaxd.rpc.errors import explain
from relaxd.rpc.tls import TlsFiles, connection_hint
from relaxd.v1.coordinator_pb2 import HeartbeatRequest, HeartbeatResponse, RegisterRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import GetStatusResponse

CALL_SECONDS = 5.0
"""Deadline of a registration or a heartbeat."""
RETRY_SECONDS = 0.5
"""Pause between two attempts while the coordinator is away."""
PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
"""Statuses that may be gone at the next attempt."""

_log = logging.getLogger(__name__)


class Refused(Exception):
    """The coordinator will never take this replica as it is; the message says why."""


class Membership:
    """Keeps a replica registered.

    Args:
        coordinator: stub of the coordinator.
        address: where the coordinator is, for messages.
        registration: what to register with.
        status: what to say in heartbeats.
        heard: called with every answer; that to a registration as if it were one to a heartbeat.
        registered: called after each registration, before `heard`.
        answered: called when a registration or a heartbeat was answered, with the time at which it was sent, by the
            monotonic clock, and the seconds for which GPUs are leased from when it arrived.
        engine_ranks: ranks of the engine now; when they change, the replica registers again.
        tls: what the stub's channel uses, for messages.
    """

    def __init__(
        self,
        coordinator: CoordinatorStub,
        address: str,
        registration: RegisterRequest,
        status: Callable[[], GetStatusResponse],
        heard: Callable[[HeartbeatResponse], Awaitable[None]],
        registered: Callable[[], Awaitable[None]],
        answered: Callable[[float, float], None],
        engine_ranks: Callable[[], int],
        tls: TlsFiles,
    ) -> None:
        self._coordinator = coordinator
        self._address = address
        self._registration = registration
        self._status = status
        self._heard = heard
        self._registered = registered
        self._answered = answered
        self._engine_ranks = engine_ranks
        self._tls = tls
        self._soon = asyncio.Event()
        self._away = False
        self._heartbeat_seconds = 1.0

    def tell_soon(self) -> None:
        """Send the next heartbeat now: the status has changed."""
        self._soon.set()

    @property
    def launch_id(self) -> str:
        """The name under which this replica was scaled out, for the next registration; empty if it wasn't."""
        return self._registration.launch_id

    @launch_id.setter
    def launch_id(self, launch_id: str) -> None:
        self._registration.launch_id = launch_id

    async def run(self) -> None:
        """Register and send heartbeats until cancelled. Raises Refused."""
        while True:
            await self._register()
            while await self._heartbeat():
                await self._pause(self._heartbeat_seconds)

    async def _register(self) -> None:
        while True:
            self._registration.engine_ranks = self._engine_ranks()
            sent = time.monotonic()
            try:
                answer = await self._coordinator.Register(self._registration, timeout=CALL_SECONDS)
                self._answered(sent, answer.gpu_lease_seconds)
                await self._registered()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (*PASSING, grpc.StatusCode.NOT_FOUND):
                    raise Refused(
                        f"the coordinator at {self._address} refuses {self._registration.replica_id}: {explain(error)}"
                    ) from error
                await self._note_away(error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._away = False
            self._heartbeat_seconds = answer.heartbeat_seconds or 1.0
            _log.info("registered with the coordinator at %s", self._address)
            await self._heard(HeartbeatResponse(assignment=answer.assignment))
            return

    async def last_word(self) -> None:
        """Tell the coordinator the status once more, if it is there."""
        request = HeartbeatRequest(replica_id=self._registration.replica_id, status=self._status())
        try:
            await self._coordinator.Heartbeat(request, timeout=1.0)
        except grpc.aio.AioRpcError as error:
            _log.info("the coordinator at %s was not told: %s", self._address, explain(error))

    async def _heartbeat(self) -> bool:
        """Send one heartbeat. Returns whether this replica is still known, as far as anyone can say."""
        if self._engine_ranks() != self._registration.engine_ranks:
            return False  # the place that it has in weight groups would be too small, or too large
        self._soon.clear()
        request = HeartbeatRequest(replica_id=self._registration.replica_id, status=self._status())
        sent = time.monotonic()
        try:
            answer = await self._coordinator.Heartbeat(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                _log.info("the coordinator at %s does not know this replica: registering again", self._address)
                return False
            if error.code() not in PASSING:
                raise Refused(
                    f"the coordinator at {self._address} refuses {request.replica_id}'s heartbeat: {explain(error)}"
                ) from error
            await self._note_away(error)
            return True
        self._answered(sent, answer.gpu_lease_seconds)
        if self._away:
            self._away = False
            _log.info("the coordinator at %s is back", self._address)
        await self._heard(answer)
        return True

    async def _pause(self, seconds: float) -> None:
        if self._away:
            # A change of status is no news to nobody: no burst of calls while the coordinator is away.
            await asyncio.sleep(min(seconds, RETRY_SECONDS))
            return
        try:
            async with asyncio.timeout(seconds):
                await self._soon.wait()
        except TimeoutError:
            pass

    async def _note_away(self, error: grpc.aio.AioRpcError) -> None:
        if self._away:
            return
        self._away = True
        why = explain(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            hint = await asyncio.to_thread(connection_hint, self._address, error.details() or "", self._tls)
            why = f"{hint} ({why})" if hint else why
        _log.warning("the coordinator at %s does not answer, trying on: %s", self._address, why)
