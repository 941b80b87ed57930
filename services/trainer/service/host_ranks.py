"""A trainer's ranks on several hosts: on its own host, and on the hosts of replicas of the role `ranks`.

The trainer numbers its starts in Redis. A host refuses a start with a smaller number than the newest that it knows, and
ends the ranks of an older start before a new one. Ranks of different starts never meet, because the number is part of
their store's keys. When any rank or host is lost, all ranks are killed and the next start begins, with the hosts that
are ready then.
"""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from relaxd import __version__
from relaxd.board import Board, BoardError, Fenced, stages_for
from relaxd.config import RunConfig
from relaxd.process.child import ChildError
from relaxd.process.child_channel import EOF
from relaxd.process.ports import NoFreePort, ReservedPort, check_reaches, interface_towards, reserve_port
from relaxd.replica.peer_replicas import Peer, PeerReplicas
from relaxd.replica.replica_service import ReplicaContext
from relaxd.roles import RANKS
from relaxd.rpc.credentials import is_loopback
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
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.ranks_pb2_grpc import RanksStub
from services.trainer.service.rank_processes import MeetingPlace, Rank, RankEvent, RankPool, RankProcess, RankProcesses

BEAT_SECONDS = 1.0
"""Seconds between heartbeats of trainer and host, in both directions."""
SILENT_SECONDS = 5.0
"""Seconds of silence after which trainer and host consider each other dead."""
LIFELINE_SECONDS = 10 * 365 * 86400.0
"""Deadline of the stream that keeps a host's ranks alive, in seconds: longer than any run. The default would be
minutes."""


SUPERSEDED = "ATTEMPT_SUPERSEDED"
"""Reason of FAILED_PRECONDITION errors: the host knows a newer attempt, whose number is the error's subject."""


class HostRefused(FailedPrecondition):
    """A host refused to start its ranks; the message says why."""

    def __init__(self, message: str, newest: int = 0) -> None:
        """`newest`: number of the newest attempt that the host knows, if it refuses this one as older; else 0."""
        super().__init__(message)
        self.newest = newest


class RemoteRank:
    """A trainer rank on another host, called through that host's ranks service."""

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
    """The ranks that one attempt starts on one other host, and the stream that keeps the ranks alive."""

    def __init__(self, peer: Peer[ranks_pb2_grpc.RanksStub], start: ranks_pb2.RanksStart, on_event: RankEvent) -> None:
        """`peer`: the ranks replica on the host."""
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
        """Start the host's ranks, whose work begins at once. Return when the host takes part. Raises HostRefused."""
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
        """Wait until a rank fails or dies, or the host is lost. Return the error, like RankSet.failed."""
        return await asyncio.shield(self._failure)

    def kill(self) -> None:
        """End the stream, so that the host kills its ranks. An unreachable host kills its ranks by itself."""
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
        """Return the stream's next response. Raises Unavailable if the stream is over or silent, and AioRpcError."""
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
        """Return the error's text. If the host didn't answer, add its address, which may be wrong."""
        address = f" (its address is {self._peer.address}, by --host or --advertise: RELAXD_HOST, RELAXD_ADVERTISE)"
        return f"{error}{address if isinstance(error, Unavailable) else ''}"

    async def _follow(self) -> None:
        """Pass on the events of the host's ranks until a rank fails or the stream ends."""
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
    """Convert a gRPC error of a call to a host. Without an answer it becomes Unavailable."""
    if has_status(error):
        return from_call(error)
    return Unavailable(f"{host} does not answer: {explain(error)}")


POLL_SECONDS = 0.1
CAUSE_SECONDS = 0.3
"""Seconds to wait for further failures of ranks after the first, so that the error names all of them."""
AVOIDED_SECONDS = 1.0
"""Seconds for which a host that did not start its ranks isn't asked again."""

logger = logging.getLogger(__name__)


class TrainerHosts:
    """Finds hosts for a trainer's ranks, and numbers the attempts to start the ranks."""

    def __init__(
        self, context: ReplicaContext, config: RunConfig, assignment: Assignment, *, advertised: str, listen: str
    ) -> None:
        """Start watching the replicas of the role `ranks`.

        Args:
            context: context of the trainer's replica.
            config: the run's configuration.
            assignment: the trainer's assignment to the run.
            advertised: host at which others reach this process.
            listen: address on which rank 0 listens; empty: on all.
        """
        self.config = config
        self.advertised = advertised
        self.listen = listen
        self.run_folder = Path(assignment.folder)
        self._context = context
        self._assignment = assignment
        self._others = config.trainer.hosts - 1
        self._peers = PeerReplicas(RANKS, RanksStub, context.coordinator, context.settings, assignment.run_id)
        self._board = Board(context.settings.redis, assignment.run_id, stages_for(config), config.board)
        self._process = uuid.uuid4().hex
        self._attempt = 0
        logger.warning(
            "the trainer's ranks are on %d hosts: nothing between them is encrypted or authenticated, also with TLS, "
            "which covers calls but neither the ranks' store nor gloo and NCCL. Use a network of their own",
            config.trainer.hosts,
        )

    async def close(self) -> None:
        """Close the connections to the hosts and to the board."""
        await self._peers.close()
        await asyncio.to_thread(self._board.close)

    async def wait_ready(self, on_wait: Callable[[str], None]) -> list[Peer[RanksStub]]:
        """Wait until enough hosts are ready. Return as many as the trainer needs, sorted by name.

        `on_wait` is called with a description of the wait.
        """
        while True:
            now = time.monotonic()
            found = sorted(
                (peer for peer in self._peers.ready if peer.avoided_until <= now),
                key=lambda peer: _order(peer.replica_id),
            )
            if len(found) >= self._others:
                return found[: self._others]
            avoided = [peer.avoided_why for peer in self._peers.ready if peer.avoided_until > now]
            reasons = [*avoided, *self._peers.unready()] or [f"no other replica of the role {RANKS} is registered"]
            missing = self._others - len(found)
            on_wait(
                f"waiting for {missing} of the {self.config.trainer.hosts} hosts (trainer.hosts): {'; '.join(reasons)}"
            )
            await asyncio.sleep(POLL_SECONDS)  # named: `on_wait` reports it

    def avoid(self, host: str, refusal: HostRefused) -> None:
        """Don't ask a host for AVOIDED_SECONDS, because it refused to start ranks."""
        self._attempt = max(self._attempt, refusal.newest)
        for peer in self._peers.ready:
            if peer.replica_id == host:
                if str(refusal) != peer.avoided_why:
                    logger.warning("attempt %d: %s", self._attempt, refusal)
                self._peers.avoid(peer, AVOIDED_SECONDS, why=str(refusal))

    async def new_attempt(self) -> int:
        """Take a new attempt number for the next start of the ranks from the board.

        Raises ChildError. If another trainer has taken over, this process also gives up.
        """
        try:
            self._attempt = await asyncio.to_thread(self._board.new_attempt, self._process, self._attempt)
        except Fenced as error:
            self._context.give_up(str(error))
            raise ChildError(str(error)) from error
        except BoardError as error:
            raise ChildError(f"a start of the ranks can't be numbered: {error}") from error
        return self._attempt

    def start_of(self, attempt: int, place: MeetingPlace, mark: str, index: int) -> ranks_pb2.RanksStart:
        """Return the request that starts ranks on another host. `index` counts the other hosts from 1."""
        each = self.config.trainer.ranks_per_host
        return ranks_pb2.RanksStart(
            attempt=attempt,
            trainer_id=self._context.settings.replica_id,
            package_version=__version__,
            run_id=self._assignment.run_id,
            begin_time=self._assignment.begin_time,
            mark=mark,
            first_rank=index * each,
            ranks=each,
            store_host=place.host,
            store_port=place.port,
        )


class HostRanks:
    """The ranks of one attempt on all hosts of the trainer."""

    def __init__(
        self,
        hosts: TrainerHosts,
        on_event: RankEvent,
        on_wait: Callable[[str], None],
        pool: RankPool,
    ) -> None:
        """`on_wait` is called with what the start waits for; `pool`: rank processes of this host."""
        self._hosts = hosts
        self._on_event = on_event
        self._on_wait = on_wait
        self._pool = pool
        self._own: RankProcesses | None = None
        self._others: list[RemoteRanks] = []
        self._port: ReservedPort | None = None

    @property
    def ranks(self) -> Sequence[Rank]:
        own = self._own.ranks if self._own is not None else []
        return [*own, *(rank for host in self._others for rank in host.ranks)] if own else []

    @property
    def rank0(self) -> RankProcess:
        assert self._own is not None
        return self._own.rank0

    async def start(self) -> None:
        """Start the ranks of all hosts, once enough hosts are ready. Raises ChildError."""
        place = None
        while place is None:
            place = await self._start_others(await self._hosts.wait_ready(self._on_wait))
        names = ", ".join(host.host for host in self._others)
        logger.info(
            "attempt %d: ranks are on this host and on %s, over %s", place.attempt, names, place.gloo_interfaces
        )
        self._on_wait("starting the ranks")
        numbers = range(self._hosts.config.trainer.ranks_per_host)
        self._own = RankProcesses(numbers, self._on_event, self._pool, place=place)
        await self._own.start()

    def work(self, request: rank_pb2.WorkRequest) -> None:
        """Let this host's ranks begin their work. Ranks of other hosts do so by themselves."""
        assert self._own is not None
        self._own.work(request)

    async def failed(self) -> RpcError:
        assert self._own is not None
        parts: list[RankProcesses | RemoteRanks] = [self._own, *self._others]
        waits = [asyncio.create_task(part.failed()) for part in parts]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            # A rank that died on one host ends collectives on others, which may report their failure first.
            await asyncio.wait(waits, timeout=CAUSE_SECONDS)
        finally:
            for task in waits:
                task.cancel()
        errors = [task.result() for task in waits if task.done() and not task.cancelled()]
        refusals = (error for error in errors if isinstance(error, InvalidArgument))
        return next(refusals, errors[0] if len(errors) == 1 else ChildError("; ".join(map(str, errors))))

    async def kill(self) -> None:
        """Kill this host's ranks, and let the other hosts kill theirs."""
        self._end_others()
        if self._own is not None:
            await self._own.kill()

    def _end_others(self) -> None:
        for host in self._others:
            host.kill()
        self._others = []
        if self._port is not None:
            self._port.close()

    async def _start_others(self, peers: Sequence[Peer[RanksStub]]) -> MeetingPlace | None:
        """Start ranks on the other hosts. Return their meeting place, or None if a host refused. Avoid such hosts."""
        attempt = await self._hosts.new_attempt()
        place = await asyncio.to_thread(self._meet, attempt, [peer.address for peer in peers])
        mark = self._hosts.run_folder / f".hosts-{uuid.uuid4().hex}"
        try:
            await asyncio.to_thread(mark.touch)
            self._others = [
                RemoteRanks(peer, self._hosts.start_of(attempt, place, mark.name, index), self._on_event)
                for index, peer in enumerate(peers, 1)
            ]
            results = await asyncio.gather(*(host.start() for host in self._others), return_exceptions=True)
        except OSError as error:
            raise ChildError(f"the run's folder can't be written to: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(mark.unlink)
        refused = {host.host: result for host, result in zip(self._others, results, strict=True) if result is not None}
        if not refused:  # all hosts have answered, so what fails now is this host's interface
            try:
                for peer in peers:
                    host, port = _host_and_port(peer.address)
                    await asyncio.to_thread(check_reaches, place.gloo_interfaces, host, port)
            except OSError as error:
                raise ChildError(
                    f"the trainer's host finds no way to {peer.replica_id}: {error}. Correct its GLOO_SOCKET_IFNAME"
                ) from error
            return place
        self._end_others()
        for host, refusal in refused.items():
            if not isinstance(refusal, HostRefused):
                raise refusal
            self._hosts.avoid(host, refusal)
        return None

    def _meet(self, attempt: int, addresses: Sequence[str]) -> MeetingPlace:
        """Reserve a port where all ranks meet. Return a meeting place reachable from `addresses`. Raises ChildError."""
        hosts = self._hosts
        far = [address for address in addresses if not is_loopback(address.rpartition(":")[0])]
        if far and is_loopback(hosts.advertised):
            raise ChildError(
                f"this trainer listens on {hosts.advertised}, where the host at {far[0]} doesn't reach it: set --host "
                "or --advertise (RELAXD_HOST, RELAXD_ADVERTISE) to an address of its network"
            )
        try:
            self._port = reserve_port(hosts.listen, hosts.config.weights.port_range)
            interface = interface_towards(*_host_and_port(addresses[0]))
        except NoFreePort as error:
            raise ChildError(str(error)) from error
        except OSError as error:
            raise ChildError(f"no meeting place with the host at {addresses[0]}: {error}") from error
        return MeetingPlace(
            host=hosts.advertised,
            listen=hosts.listen,
            port=self._port.number,
            size=hosts.config.trainer.ranks,
            interface=interface,
            attempt=attempt,
        )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _order(replica_id: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in names by value: ranks-2 comes before ranks-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", replica_id)]
