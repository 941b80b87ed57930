"""Server of relaxd.v1.Replica, which every replica has, and a check of the order of weight synchronisations."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from relaxd.rpc.leader_term import NewestTerm
from relaxd.v1 import replica_pb2, replica_pb2_grpc

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
