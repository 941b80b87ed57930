"""The rank processes of one Megatron world that are children of this process, started together and killed together; and
the pool that starts some in advance.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relaxd.process.child import Child, ChildError
from relaxd.process.child_channel import RequestStream
from relaxd.process.gpu_lease import GpuLease
from relaxd.process.ports import NoFreePort, ReservedPort, reserve_port
from relaxd.replica.gpus import Gpu, gpu_environment
from relaxd.rpc.errors import InvalidArgument, RpcError
from relaxd.v1 import rank_pb2, rank_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from relaxd.weights import NCCL_ENVIRONMENT
from services.trainer.megatron import ATTEMPT_VARIABLE

RANK = "services.trainer.loop.training_rank"
"""Module that each of the trainer's rank processes runs."""

logger = logging.getLogger(__name__)


class RankPool:
    """Starts a run's rank processes, and keeps spare processes for restarts of all ranks.

    Loading torch and Megatron takes a core 3 s. A spare process has loaded them, and uses no device before it works.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        gpu_lease: GpuLease | None,
        module: str = RANK,
        *,
        spares: int = 0,
    ) -> None:
        """`spares`: number of spare processes that `prepare` starts."""
        self._environment = environment
        self._gpu_lease = gpu_lease
        self._module = module
        self._count = spares
        self._spares: list[Child] = []
        self._preparing: asyncio.Task[None] | None = None

    async def take(self, name: str, place: Mapping[str, str]) -> Child:
        """Return a process for a rank: a spare process, or else a new one. Raises ChildError.

        `place`: environment variables of a new process. A spare process gets them later, with its work.
        """
        while self._spares:
            child = self._spares.pop(0)
            if child.alive:
                child.rename(name)
                return child
        return await self._start(name, place)

    def prepare(self) -> None:
        """Start the missing spare processes in the background."""
        if self._count and (self._preparing is None or self._preparing.done()):
            self._preparing = asyncio.create_task(self._prepare(), name="spare ranks")

    async def close(self) -> None:
        """Kill the spare processes, and wait until they have exited."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait({self._preparing})
        for child in self._spares:
            child.kill()
        for child in self._spares:
            await asyncio.shield(child.exited)
        self._spares = []

    async def _prepare(self) -> None:
        self._spares = [child for child in self._spares if child.alive]
        try:
            while len(self._spares) < self._count:
                self._spares.append(await self._start("spare rank", {}))
        except ChildError as error:  # the next start does without spare processes
            logger.warning("%s", error)

    async def _start(self, name: str, place: Mapping[str, str]) -> Child:
        return await Child.start(self._module, env={**self._environment, **place}, name=name, gpu_lease=self._gpu_lease)


LOOPBACK = "127.0.0.1"
"""Address at which ranks meet that are all on one machine."""
START_SECONDS = 600.0
"""Deadline in seconds until a rank's process serves. Importing torch and Megatron takes seconds, but minutes for eight
ranks that read them from a cold or busy disk. A process that exits meanwhile is noticed at once."""
PAUSE_SECONDS = 10.0
"""Deadline in seconds of a call that pauses or resumes a rank, which only changes a flag."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Environment variables that make torch allocate host memory in huge pages: a checkpoint is copied faster."""


class Rank(Protocol):
    """A trainer rank, on this host or another, as a participant in weight broadcasts."""

    number: int
    loaded: rank_pb2.RankLoaded | None
    """The rank's part in weight broadcasts; None before it has loaded its model."""

    async def join(self, request: trainer_pb2.TrainerJoinWeightGroupRequest, *, timeout: float) -> None:
        """Connect the rank to the engines in a weight group. Raises RpcError."""

    async def broadcast(
        self, request: rank_pb2.BroadcastVersionsRequest, *, timeout: float
    ) -> rank_pb2.BroadcastVersionsResponse:
        """Let the rank do its part of a weight broadcast. Raises RpcError."""

    async def leave(self, request: trainer_pb2.TrainerLeaveWeightGroupRequest, *, timeout: float) -> None:
        """Let the rank leave a weight group. Raises RpcError."""


RankEvent = Callable[[Rank, rank_pb2.WorkResponse], None]
"""Callback for events of ranks; gets the rank and the event."""


class RankSet(Protocol):
    """All ranks of a trainer, started and killed together. After a rank dies, a new set replaces this one."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks by number; empty before the start."""

    @property
    def rank0(self) -> "RankProcess":
        """Rank 0, which is a child of the trainer."""

    async def start(self) -> None:
        """Start every rank. Return once all have loaded their code. Raises ChildError."""

    def work(self, request: rank_pb2.WorkRequest) -> None:
        """Let every rank begin its work, such as training."""

    async def failed(self) -> RpcError:
        """Wait until a rank fails or dies; return the error.

        InvalidArgument means that settings or model are wrong, so another start would fail, too.
        """

    async def kill(self) -> None:
        """Kill all ranks of the set."""


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """Address and port at which ranks that start together meet."""

    host: str
    """Address of the ranks' rendezvous store."""
    listen: str
    """Address on which rank 0 serves the store; "" for all addresses."""
    port: int
    size: int
    """Number of ranks in the world."""
    interface: str
    """Network interface of this machine's ranks, unless environment variables name another; "" for any."""
    attempt: int = 0
    """Number of the attempt, for ranks on several hosts; 0 otherwise. Ranks of different attempts never meet."""

    @property
    def gloo_interfaces(self) -> str:
        """Network interfaces for gloo, separated by commas."""
        return os.environ.get("GLOO_SOCKET_IFNAME", self.interface)

    def environment(self, number: int, local: int) -> dict[str, str]:
        """Return the environment variables of rank `number`, whose index on its machine is `local`."""
        found = {
            "MASTER_ADDR": self.listen if number == 0 else self.host,
            "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(self.size),
            "RANK": str(number),
            "LOCAL_RANK": str(local),
        }
        if self.interface:
            # gloo has no authentication: bind it to one interface.
            found["GLOO_SOCKET_IFNAME"] = self.gloo_interfaces
        if self.attempt:
            found[ATTEMPT_VARIABLE] = str(self.attempt)
            found["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={self.interface}")
        return found


def rank_environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the environment variables of training ranks on `gpus`, or on the CPU if there are none."""
    return gpu_environment(gpus) | NCCL_ENVIRONMENT | (HUGE_PAGES if gpus else {})


def rank_gauges(ranks: Sequence[Rank]) -> dict[str, float]:
    """Return gauges by name: the number of ranks, and the process id of each rank on this machine."""
    own = [rank for rank in ranks if isinstance(rank, RankProcess)]
    return {"ranks": float(len(ranks)), **{f"rank{rank.number}_pid": float(rank.child.pid) for rank in own}}


@dataclass
class RankProcess:
    """A rank in a child process, with stubs to call it."""

    number: int
    child: Child
    trainer: Any
    """Stub of the rank's Trainer service."""
    control: Any
    """Stub of the rank's Rank service."""
    broadcasts: RequestStream
    """Stream of broadcast requests to the rank."""
    environment: Mapping[str, str]
    """Environment variables that tell the rank its number and where the ranks meet."""
    loaded: rank_pb2.RankLoaded | None = None

    async def join(self, request: trainer_pb2.TrainerJoinWeightGroupRequest, *, timeout: float) -> None:
        await self.trainer.JoinWeightGroup(request, timeout=timeout)

    async def broadcast(
        self, request: rank_pb2.BroadcastVersionsRequest, *, timeout: float
    ) -> rank_pb2.BroadcastVersionsResponse:
        response: rank_pb2.BroadcastVersionsResponse = await self.broadcasts.ask(request, timeout=timeout)
        return response

    async def leave(self, request: trainer_pb2.TrainerLeaveWeightGroupRequest, *, timeout: float) -> None:
        await self.trainer.LeaveWeightGroup(request, timeout=timeout)

    async def set_paused(self, paused: bool) -> None:
        """Pause or resume the rank. Errors are ignored: the supervisor notices dead ranks."""
        with contextlib.suppress(RpcError):
            await self.control.SetPaused(rank_pb2.SetPausedRequest(paused=paused), timeout=PAUSE_SECONDS)

    async def hand_back(self, seconds: float, *, timeout: float) -> bool:
        """Ask the rank to hand back its groups within `seconds`. Return True if it has; False also on errors."""
        with contextlib.suppress(RpcError):
            request = rank_pb2.HandBackGroupsRequest(seconds=seconds)
            return bool((await self.control.HandBackGroups(request, timeout=timeout)).done)
        return False


class RankProcesses:
    """The ranks on this machine, started and killed together."""

    def __init__(
        self,
        numbers: range,
        on_event: RankEvent,
        pool: RankPool,
        *,
        ports: range | None = None,
        place: MeetingPlace | None = None,
    ) -> None:
        """Prepare to start the ranks.

        Args:
            numbers: numbers of the ranks.
            on_event: called with each rank and event.
            pool: source of the ranks' processes.
            ports: allowed ports (weights.ports); None: any.
            place: meeting place with ranks of other hosts; None: all ranks are here, and meet on one of `ports`.
        """
        self._numbers = numbers
        self._on_event = on_event
        self._pool = pool
        self._ports = ports
        self._place = place
        self.ranks: list[RankProcess] = []
        self._port: ReservedPort | None = None
        """Reserved port on which the ranks meet. Rank 0 listens on it once its code is loaded."""
        self._reading: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[RpcError] = asyncio.get_running_loop().create_future()

    @property
    def rank0(self) -> RankProcess:
        """The first rank on this machine: rank 0 on the trainer's own host."""
        return self.ranks[0]

    async def start(self) -> None:
        """Start every rank. Return once all have loaded their code. Ranks use no device before `work`.

        Raises:
            ChildError: a rank didn't start, or there is no port for the ranks to meet on.
        """
        place = self._place or self._meet_here()
        for local, number in enumerate(self._numbers):
            where = place.environment(number, local)
            child = await self._pool.take(f"rank {number}", where)
            trainer = trainer_pb2_grpc.TrainerStub(child.channel)
            control = rank_pb2_grpc.RankStub(child.channel)
            broadcasts = RequestStream(control.BroadcastVersions, f"BroadcastVersions of {child.name}")
            self.ranks.append(RankProcess(number, child, trainer, control, broadcasts, where))
            child.exited.add_done_callback(lambda _, child=child: self._exited(child))  # type: ignore[misc]
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*(rank.child.wait_connected() for rank in self.ranks))
        except TimeoutError:
            raise ChildError(f"a rank did not start within {START_SECONDS:g} s") from None
        self._pool.prepare()  # the ranks have loaded their code: the spares may load theirs

    def work(self, request: rank_pb2.WorkRequest) -> None:
        """Let every rank on this machine begin its work, such as training."""
        self._reading = [asyncio.create_task(self._read(rank, request)) for rank in self.ranks]

    async def failed(self) -> RpcError:
        return await asyncio.shield(self._failure)

    async def kill(self) -> None:
        """Kill the ranks, and wait until all have exited."""
        for task in self._reading:
            task.cancel()
        for rank in self.ranks:
            rank.child.kill()
        if self.ranks:
            await asyncio.wait({asyncio.ensure_future(asyncio.shield(rank.child.exited)) for rank in self.ranks})
        if self._port is not None:
            self._port.close()

    def _meet_here(self) -> MeetingPlace:
        """Reserve a port for ranks that are all on this machine. Return the meeting place. Raises ChildError."""
        try:
            self._port = reserve_port(LOOPBACK, self._ports)
        except NoFreePort as error:
            raise ChildError(str(error)) from error
        interface = "lo" if sys.platform == "linux" else ""
        return MeetingPlace(
            host=LOOPBACK, listen=LOOPBACK, port=self._port.number, size=len(self._numbers), interface=interface
        )

    async def _read(self, rank: RankProcess, request: rank_pb2.WorkRequest) -> None:
        """Start a rank's work, and pass on its events until it ends."""
        own = rank_pb2.WorkRequest()
        own.CopyFrom(request)
        own.environment.update(rank.environment)
        try:
            async for event in rank.control.Work(own, timeout=None):
                if event.HasField("failed"):
                    reason = f"{rank.child.name}: {event.failed}"
                    self._fail(InvalidArgument(reason) if event.start_refused else ChildError(reason))
                else:
                    self._on_event(rank, event)
        except ChildError:
            pass  # `_exited` says how
        except RpcError as error:
            self._fail(ChildError(f"{rank.child.name}: {error}"))

    def _exited(self, child: Child) -> None:
        ended = child.exited.result()
        last = ended.last_lines[-1:]
        self._fail(ChildError(f"{child.name} {ended}" + (f": {last[0]}" if last and ended.exit_code > 0 else "")))

    def _fail(self, error: RpcError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)
