"""python -m services.trainer.ranks: the service of a host's ranks, for a trainer on another host (`trainer.hosts`).

The replica leases their GPUs and waits for the trainer to start them. Nothing here imports torch.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC
from pathlib import Path
from typing import Any

from relaxd import __version__
from relaxd.board import roles_for
from relaxd.config import RunConfig
from relaxd.process.child import ChildError
from relaxd.process.ports import check_reaches, interface_towards
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus, open_context
from relaxd.roles import RANKS, TRAINER
from relaxd.rpc.errors import Aborted, FailedPrecondition, InvalidArgument, RpcError
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import rank_pb2, ranks_pb2, ranks_pb2_grpc
from relaxd.v1 import ranks_pb2 as pb
from relaxd.v1.coordinator_pb2 import Assignment
from services.trainer.reference_models.followed_folder import await_run_folder
from services.trainer.service.host_ranks import BEAT_SECONDS, SILENT_SECONDS, SUPERSEDED
from services.trainer.service.rank_processes import (
    MeetingPlace,
    Rank,
    RankPool,
    RankProcess,
    RankProcesses,
    rank_environment,
    rank_gauges,
)

MARK_SECONDS = 3.0
"""Maximum seconds until the file that the trainer writes into the run's folder is visible here. Network file systems
show files late."""
POLL_SECONDS = 0.1

logger = logging.getLogger(__name__)


class HostAttempt:
    """The trainer's rank processes on this host, started for one attempt, and their events."""

    def __init__(self, start: ranks_pb2.RanksStart, pool: RankPool, place: MeetingPlace) -> None:
        numbers = range(start.first_rank, start.first_rank + start.ranks)
        self.number = start.attempt
        self.trainer_id = start.trainer_id
        self._processes = RankProcesses(numbers, self._on_event, pool, place=place)
        self.responses: asyncio.Queue[ranks_pb2.StartRanksResponse] = asyncio.Queue()
        """Responses to stream to the trainer. A failure is the last one."""
        self._living: asyncio.Task[None] | None = None

    @property
    def ranks(self) -> list[RankProcess]:
        """The running rank processes."""
        return self._processes.ranks

    def begin(self, work: rank_pb2.WorkRequest) -> None:
        """Start the rank processes in a task. Their work begins once they have loaded their code."""
        self._living = asyncio.create_task(self._live(work), name=f"attempt {self.number}")

    def fail(self, error: RpcError) -> None:
        """Tell the trainer that the ranks have failed."""
        failed = ranks_pb2.RanksFailed(reason=str(error), start_refused=isinstance(error, InvalidArgument))
        self.responses.put_nowait(ranks_pb2.StartRanksResponse(failed=failed))

    async def end(self) -> None:
        """Kill the attempt's rank processes."""
        if self._living is not None:
            self._living.cancel()
            await asyncio.wait({self._living})
        await self._processes.kill()

    async def _live(self, work: rank_pb2.WorkRequest) -> None:
        try:
            await self._processes.start()
            self._processes.work(work)
            self.fail(await self._processes.failed())
        except ChildError as error:
            self.fail(error)

    def _on_event(self, rank: Rank, event: rank_pb2.WorkResponse) -> None:
        said = ranks_pb2.RankEvent(rank=rank.number, event=event)
        self.responses.put_nowait(ranks_pb2.StartRanksResponse(rank=said))


class RanksService(ReplicaService):
    """Replica service that starts the trainer's ranks on this host."""

    role = RANKS

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._config: RunConfig | None = None
        self._assignment = Assignment()
        self._pool: RankPool | None = None
        """Pool of processes for this host's ranks."""
        self._newest = 0
        """Number of the newest attempt that this host knows in this run."""
        self._attempt: HostAttempt | None = None
        self._changing = asyncio.Lock()
        self._detail = ""

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """Lease this host's GPUs for ranks, which the trainer will start later."""
        if RANKS not in roles_for(config):
            self._detail = f"this run needs no {RANKS} service: trainer.hosts is 1"
            return
        begun = assignment.begin_time.ToDatetime(UTC)
        await asyncio.to_thread(await_run_folder, Path(assignment.folder), RANKS, begun)
        gpus = await self._context.gpus.lease(config.trainer.ranks_per_host)
        gpu_lease = self._context.gpus.child_lease if gpus else None
        self._pool = RankPool(rank_environment(gpus), gpu_lease, spares=config.trainer.ranks_per_host)
        self._pool.prepare()  # while the trainer waits for other hosts, or for its own ranks
        self._config, self._assignment, self._newest = config, assignment, 0
        self._detail = "the trainer has not started ranks here"

    async def stop_run(self) -> None:
        async with self._changing:  # a start that is being checked ends first; its ranks are killed below
            self._config = None
            if self._attempt is not None:
                self._attempt.fail(Aborted(f"{self._context.settings.replica_id} leaves the run"))
                await self._end_attempt(self._attempt)
            if self._pool is not None:
                await self._pool.close()
            self._pool, self._detail = None, ""

    async def drain(self, seconds: float) -> int:
        """Return 0: only the trainer holds groups."""
        return 0

    async def pause_run(self) -> None:
        """Do nothing: the trainer itself pauses training."""

    async def resume_run(self) -> None:
        """Do nothing: the trainer itself resumes training."""

    def status(self) -> ServiceStatus:
        ranks = self._attempt.ranks if self._attempt is not None else []
        return ServiceStatus(detail=self._detail, gauges=rank_gauges(ranks))

    async def begin(self, start: ranks_pb2.RanksStart) -> HostAttempt:
        """Kill the ranks of the previous attempt, and start those of a new one. Raises FailedPrecondition."""
        async with self._changing:
            await self._check(start)
            self._newest = start.attempt
            if self._attempt is not None:
                self._attempt.fail(Aborted(f"attempt {start.attempt} of {start.trainer_id} has begun"))
                await self._attempt.end()
            config, pool, settings = self._config, self._pool, self._context.settings
            assert config is not None
            assert pool is not None
            try:
                interface = await asyncio.to_thread(interface_towards, start.store_host, start.store_port)
                place = MeetingPlace(
                    host=start.store_host,
                    listen=start.store_host,
                    port=start.store_port,
                    size=config.trainer.ranks,
                    interface=interface,
                    attempt=start.attempt,
                )
                await asyncio.to_thread(check_reaches, place.gloo_interfaces, place.host, place.port)
            except OSError as error:
                raise FailedPrecondition(
                    f"{settings.replica_id} finds no way to {start.store_host}: {error}. Correct "
                    f"GLOO_SOCKET_IFNAME of {settings.replica_id}, or --host or --advertise (RELAXD_HOST, "
                    f"RELAXD_ADVERTISE) of {start.trainer_id}"
                ) from None
            attempt = HostAttempt(start, pool, place)
            work = rank_pb2.WorkRequest(
                run_id=self._assignment.run_id,
                config_json=config.model_dump_json(),
                folder=self._assignment.folder,
                redis=settings.redis,
                replica_id=start.trainer_id,
                log_level=settings.log_level,
                role=TRAINER,
            )
            attempt.begin(work)
            self._attempt = attempt
            self._detail = f"ranks {start.first_rank} to {start.first_rank + start.ranks - 1} of {start.trainer_id}"
            logger.info("attempt %d: %s, over %s", start.attempt, self._detail, place.gloo_interfaces)
            return attempt

    async def end(self, attempt: HostAttempt) -> None:
        """Kill the ranks of an attempt."""
        async with self._changing:
            await self._end_attempt(attempt)

    def rank(self, address: ranks_pb2.RankAddress) -> RankProcess:
        """Return the rank process at an address. Raises FailedPrecondition if its attempt is over."""
        attempt = self._attempt
        if attempt is None or attempt.number != address.attempt:
            raise FailedPrecondition(f"attempt {address.attempt} is over on {self._context.settings.replica_id}")
        for rank in attempt.ranks:
            if rank.number == address.rank:
                return rank
        raise InvalidArgument(f"to.rank is {address.rank}: {self._context.settings.replica_id} has no such rank")

    async def _end_attempt(self, attempt: HostAttempt) -> None:
        await attempt.end()
        if self._attempt is attempt:
            self._attempt = None
            self._detail = "the trainer has not started ranks here since its last attempt ended"

    async def _check(self, start: ranks_pb2.RanksStart) -> None:
        """Raise FailedPrecondition unless this host can start ranks as requested."""
        name, run = self._context.settings.replica_id, self._assignment
        if start.package_version != __version__:
            raise FailedPrecondition(
                f"{name} has relaxd {__version__}, and {start.trainer_id} has {start.package_version}: give all hosts "
                "of a trainer the same version"
            )
        config = self._config
        if config is None or (start.run_id, start.begin_time) != (run.run_id, run.begin_time):
            raise FailedPrecondition(f"{name} doesn't work on run {start.run_id} as it began last")
        if start.ranks != config.trainer.ranks_per_host:
            raise FailedPrecondition(
                f"{name} has {config.trainer.ranks_per_host} ranks by the run's settings, not {start.ranks}"
            )
        if start.attempt <= self._newest:
            raise FailedPrecondition(
                f"attempt {start.attempt} of {start.trainer_id} is over: {name} knows attempt {self._newest}",
                reason=SUPERSEDED,
                subject=str(self._newest),
            )
        mark = Path(run.folder) / start.mark
        for _ in range(int(MARK_SECONDS / POLL_SECONDS)):
            if await asyncio.to_thread(mark.exists):
                return
            await asyncio.sleep(POLL_SECONDS)  # brief: MARK_SECONDS
        raise FailedPrecondition(
            f"{name} doesn't see in {run.folder} what {start.trainer_id} writes there: mount the same folder on all "
            "hosts of a trainer"
        )


class RanksServicer(ranks_pb2_grpc.RanksServicer):
    """RPC handlers of relaxd.v1.Ranks."""

    def __init__(self, service: RanksService) -> None:
        self._service = service

    async def StartRanks(
        self, requests: AsyncIterator[pb.StartRanksRequest], context: Any
    ) -> AsyncIterator[pb.StartRanksResponse]:
        """Start ranks on this host, stream their events to the trainer, and kill the ranks when the stream ends."""
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
        """Forward to a rank: connect to the engines in a weight group."""
        await self._service.rank(request.to).join(request.join, timeout=context.time_remaining())
        return pb.RanksJoinWeightGroupResponse()

    async def BroadcastVersions(
        self, request: pb.RanksBroadcastVersionsRequest, context: Any
    ) -> pb.RanksBroadcastVersionsResponse:
        """Forward to a rank: do its part of a weight broadcast."""
        part = await self._service.rank(request.to).broadcast(request.part, timeout=context.time_remaining())
        return pb.RanksBroadcastVersionsResponse(part=part)

    async def LeaveWeightGroup(
        self, request: pb.RanksLeaveWeightGroupRequest, context: Any
    ) -> pb.RanksLeaveWeightGroupResponse:
        """Forward to a rank: leave a weight group."""
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


async def main() -> None:
    """Run the ranks service until it is stopped."""
    async with open_context(parse_settings(RANKS)) as context:
        service = RanksService(context)
        calls = Service(ranks_pb2_grpc.add_RanksServicer_to_server, RanksServicer(service), "relaxd.v1.Ranks")
        await run_replica(service, context, [calls])


if __name__ == "__main__":
    asyncio.run(main())
