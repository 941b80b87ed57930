"""relaxd.v1.Replica: the calls that every replica answers."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from relaxd.v1 import replica_pb2, replica_pb2_grpc

MAX_LAUNCH_ID = 300
"""Longest launch_id, in characters."""
REPLY_SECONDS = 0.5
"""Drain and Leave answer this long before the caller's deadline."""


class Standby(Protocol):
    """A replica that registers only on demand."""

    def join(self, launch_id: str) -> None:
        """Register under a launch id. Raises FailedPrecondition when it has joined under another one."""

    async def leave(self, launch_id: str, seconds: float) -> None:
        """Drain within `seconds` and unregister. Does nothing unless it has joined under this launch id."""


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """Answers relaxd.v1.Replica.

    Args:
        status: returns the status.
        drain: drains within some seconds; returns the number of groups still held.
        standby: handles Join and Leave; None refuses them.
        restart: handles Restart, given replica id and reason; None refuses it.
        deadline_seconds: deadline of calls that bring none.
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
        """See the proto."""
        return replica_pb2.GetStatusResponse(status=self._status())

    async def Drain(self, request: replica_pb2.DrainRequest, context: Any) -> replica_pb2.DrainResponse:
        """See the proto."""
        return replica_pb2.DrainResponse(held_groups=await self._drain(self._seconds_left(context)))

    async def Join(self, request: replica_pb2.JoinRequest, context: Any) -> replica_pb2.JoinResponse:
        """See the proto."""
        standby = self._require_standby()
        if len(request.launch_id) > MAX_LAUNCH_ID:
            # The coordinator would refuse it, and a refused replica ends.
            problem = f"has {len(request.launch_id)} characters: at most {MAX_LAUNCH_ID} are allowed"
            raise InvalidArgument(f"launch_id {problem}", [("launch_id", problem)])
        standby.join(request.launch_id)
        status = self._status()
        return replica_pb2.JoinResponse(replica_id=status.replica_id, role=status.role)

    async def Leave(self, request: replica_pb2.LeaveRequest, context: Any) -> replica_pb2.LeaveResponse:
        """See the proto."""
        await self._require_standby().leave(request.launch_id, self._seconds_left(context))
        return replica_pb2.LeaveResponse()

    async def Restart(self, request: replica_pb2.RestartRequest, context: Any) -> replica_pb2.RestartResponse:
        """See the proto."""
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
