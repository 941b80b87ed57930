"""A trainer's ranks on another host, which a replica of the role `ranks` starts: the client of relaxd.v1.Ranks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc

from relaxd.process.child import ChildError
from relaxd.process.child_channel import EOF
from relaxd.replica.peer_replicas import Peer
from relaxd.rpc.errors import (
    FailedPrecondition,
    InvalidArgument,
    RpcError,
    Unavailable,
    explain,
    failed_precondition,
    from_call,
    has_status,
)
from relaxd.v1 import rank_pb2, ranks_pb2, ranks_pb2_grpc, trainer_pb2
from services.trainer.service.rank_processes import RankEvent

BEAT_SECONDS = 1.0
"""Seconds between two signs of life of both sides."""
SILENT_SECONDS = 5.0
"""Seconds of silence after which a side counts as dead."""
LIFELINE_SECONDS = 10 * 365 * 86400.0
"""Deadline of the lifeline stream in seconds, beyond its sides' lives. By default it would be minutes."""


SUPERSEDED = "ATTEMPT_SUPERSEDED"
"""Reason of FAILED_PRECONDITION: the host knows a newer attempt, whose number is the subject."""


class HostRefused(FailedPrecondition):
    """A host can't take part now; the message says why."""

    def __init__(self, message: str, newest: int = 0) -> None:
        """`newest`: the newest attempt that the host knows, if it refuses this one as older."""
        super().__init__(message)
        self.newest = newest


class RemoteRank:
    """A rank on another host."""

    def __init__(self, number: int, host: str, stub: ranks_pb2_grpc.RanksStub, attempt: int) -> None:
        self.number = number
        self.loaded: rank_pb2.RankLoaded | None = None
        self._host = host
        self._stub = stub
        self._to = ranks_pb2.RankAddress(attempt=attempt, rank=number)

    async def join(self, request: trainer_pb2.TrainerJoinWeightGroupRequest, *, timeout: float) -> None:
        asked = ranks_pb2.RanksJoinWeightGroupRequest(to=self._to, join=request)
        await self._ask(self._stub.JoinWeightGroup(asked, timeout=timeout))

    async def broadcast(
        self, request: rank_pb2.BroadcastVersionsRequest, *, timeout: float
    ) -> rank_pb2.BroadcastVersionsResponse:
        asked = ranks_pb2.RanksBroadcastVersionsRequest(to=self._to, part=request)
        response: rank_pb2.BroadcastVersionsResponse = (
            await self._ask(self._stub.BroadcastVersions(asked, timeout=timeout))
        ).part
        return response

    async def leave(self, request: trainer_pb2.TrainerLeaveWeightGroupRequest, *, timeout: float) -> None:
        asked = ranks_pb2.RanksLeaveWeightGroupRequest(to=self._to, leave=request)
        await self._ask(self._stub.LeaveWeightGroup(asked, timeout=timeout))

    async def _ask(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _of_host(self._host, error) from None


class RemoteRanks:
    """The ranks of one start on one other host, and the stream that keeps them alive."""

    def __init__(self, peer: Peer[ranks_pb2_grpc.RanksStub], start: ranks_pb2.RanksStart, on_event: RankEvent) -> None:
        """`peer` is the host's replica."""
        self.host = peer.replica_id
        self._peer = peer
        self._called = contextlib.ExitStack()
        self._start = start
        self._on_event = on_event
        numbers = range(start.first_rank, start.first_rank + start.ranks)
        self.ranks = [RemoteRank(number, peer.replica_id, peer.stub, start.attempt) for number in numbers]
        self._call: Any = None
        self._following: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[RpcError] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start the ranks. Return once the host takes part; its ranks then work at once. Raises HostRefused."""
        stub = self._called.enter_context(self._peer.called())
        self._call = stub.StartRanks(self._requests(), timeout=LIFELINE_SECONDS)
        try:
            await self._next()
        except grpc.aio.AioRpcError as error:
            newest = failed_precondition(error, SUPERSEDED)
            raise HostRefused(self._with_address(_of_host(self.host, error)), int(newest or 0)) from None
        except RpcError as error:
            raise HostRefused(self._with_address(error)) from None
        self._following = asyncio.create_task(self._follow(), name=f"ranks of {self.host}")

    async def failed(self) -> RpcError:
        """Wait until a rank fails or dies, or the host is lost; return the error, like RankSet.failed."""
        return await asyncio.shield(self._failure)

    def kill(self) -> None:
        """Have the host kill its ranks, by ending the stream. An unreachable host does so by itself."""
        if self._following is not None:
            self._following.cancel()
        if self._call is not None:
            self._call.cancel()
        self._called.close()

    async def _requests(self) -> AsyncIterator[ranks_pb2.StartRanksRequest]:
        yield ranks_pb2.StartRanksRequest(start=self._start)
        while True:
            await asyncio.sleep(BEAT_SECONDS)  # idle: the stream lives
            yield ranks_pb2.StartRanksRequest()

    async def _next(self) -> ranks_pb2.StartRanksResponse:
        """Return the next response. Raises Unavailable if there is none, or none in time, and AioRpcError."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                response = await self._call.read()
        except TimeoutError:
            raise Unavailable(f"{self.host} has been silent for {SILENT_SECONDS:g} s") from None
        if response is EOF:
            raise Unavailable(f"{self.host} has ended its ranks")
        answer: ranks_pb2.StartRanksResponse = response
        return answer

    def _with_address(self, error: RpcError) -> str:
        """Return the words of a start's error; if nothing answered, with the address, which may be wrong."""
        address = f" (its address is {self._peer.address}, by --host or --advertise: RELAXD_HOST, RELAXD_ADVERTISE)"
        return f"{error}{address if isinstance(error, Unavailable) else ''}"

    async def _follow(self) -> None:
        """Read the responses until the ranks fail."""
        try:
            while not (response := await self._next()).HasField("failed"):
                if response.HasField("rank"):
                    event = response.rank
                    self._on_event(self.ranks[event.rank - self._start.first_rank], event.event)
        except (RpcError, grpc.aio.AioRpcError) as error:
            lost = _of_host(self.host, error) if isinstance(error, grpc.aio.AioRpcError) else error
            self._failure.set_result(ChildError(str(lost)))
            return
        reason = f"{self.host}: {response.failed.reason}"
        self._failure.set_result(InvalidArgument(reason) if response.failed.start_refused else ChildError(reason))


def _of_host(host: str, error: grpc.aio.AioRpcError) -> RpcError:
    """Return the error of a call to a host."""
    if has_status(error):
        return from_call(error)
    return Unavailable(f"{host} does not answer: {explain(error)}")
