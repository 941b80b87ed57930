"""The gRPC handlers of a host's ranks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from relaxd.rpc.errors import Aborted, InvalidArgument
from relaxd.v1 import ranks_pb2 as pb
from relaxd.v1 import ranks_pb2_grpc
from services.trainer.ranks.ranks_service import HostAttempt, RanksService
from services.trainer.service.remote_ranks import BEAT_SECONDS, SILENT_SECONDS


class RanksServicer(ranks_pb2_grpc.RanksServicer):
    """Handlers of relaxd.v1.Ranks."""

    def __init__(self, service: RanksService) -> None:
        self._service = service

    async def StartRanks(
        self, requests: AsyncIterator[pb.StartRanksRequest], context: Any
    ) -> AsyncIterator[pb.StartRanksResponse]:
        """Start the ranks, stream their events, and kill them when the stream ends."""
        first = await anext(requests, pb.StartRanksRequest())
        if not first.HasField("start"):
            raise InvalidArgument("start is missing: the first message says which ranks to start")
        attempt = await self._service.begin(first.start)
        listening = asyncio.create_task(_listen(requests, attempt), name=f"lifeline of attempt {attempt.number}")
        try:
            response = pb.StartRanksResponse()
            while not response.HasField("failed"):
                yield response
                try:
                    async with asyncio.timeout(BEAT_SECONDS):
                        response = await attempt.responses.get()
                except TimeoutError:
                    response = pb.StartRanksResponse()
            yield response
        finally:
            listening.cancel()
            await asyncio.shield(asyncio.ensure_future(self._service.end(attempt)))

    async def JoinWeightGroup(
        self, request: pb.RanksJoinWeightGroupRequest, context: Any
    ) -> pb.RanksJoinWeightGroupResponse:
        """Have a rank connect to the engines."""
        await self._service.rank(request.to).join(request.join, timeout=context.time_remaining())
        return pb.RanksJoinWeightGroupResponse()

    async def BroadcastVersions(
        self, request: pb.RanksBroadcastVersionsRequest, context: Any
    ) -> pb.RanksBroadcastVersionsResponse:
        """Have a rank do its part of a broadcast."""
        part = await self._service.rank(request.to).broadcast(request.part, timeout=context.time_remaining())
        return pb.RanksBroadcastVersionsResponse(part=part)

    async def LeaveWeightGroup(
        self, request: pb.RanksLeaveWeightGroupRequest, context: Any
    ) -> pb.RanksLeaveWeightGroupResponse:
        """Have a rank leave a group."""
        await self._service.rank(request.to).leave(request.leave, timeout=context.time_remaining())
        return pb.RanksLeaveWeightGroupResponse()


async def _listen(requests: AsyncIterator[pb.StartRanksRequest], attempt: HostAttempt) -> None:
    """Fail the attempt once the trainer is silent or has left."""
    try:
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                if await anext(requests, None) is None:
                    attempt.fail(Aborted(f"{attempt.trainer_id} has left"))
                    return
    except TimeoutError:
        attempt.fail(Aborted(f"{attempt.trainer_id} has been silent for {SILENT_SECONDS:g} s"))
