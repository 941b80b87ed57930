"""The rank processes of one Megatron world, as children of the service: started together, killed together."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relaxd.process.child import Child, ChildError
from relaxd.process.child_channel import RequestStream
from relaxd.process.gpu_lease import GpuLease
from relaxd.process.ports import NoFreePort, ReservedPort, reserve_port
from relaxd.rpc.errors import InvalidArgument, RpcError
from relaxd.v1 import rank_pb2, rank_pb2_grpc, trainer_pb2_grpc

RankEvent = Callable[["RankProcess", rank_pb2.WorkResponse], None]
"""Callback with the rank and its event."""

RANK = "services.trainer.loop.training_rank"
"""The program of a rank that trains."""
LOOPBACK = "127.0.0.1"
"""All ranks are on this machine, and meet here."""
START_SECONDS = 600.0
"""Deadline for a child to serve. Importing torch and Megatron takes seconds, but minutes for eight ranks that read them
from a cold or busy disk. One that ends meanwhile is noticed at once."""


@dataclass
class RankProcess:
    """One rank: its process and the stubs of what it serves."""

    number: int
    child: Child
    trainer: Any
    """A trainer_pb2_grpc.TrainerStub."""
    control: Any
    """A rank_pb2_grpc.RankStub."""
    broadcasts: RequestStream
    """Takes part in broadcasts of the weights."""
    loaded: rank_pb2.RankLoaded | None = None
    """Its part in broadcasts; None until it has its model."""


class RankProcesses:
    """One set of rank processes. It isn't reused: if a rank dies, all are killed and a new set is started."""

    def __init__(
        self,
        count: int,
        on_event: RankEvent,
        environment: Mapping[str, str],
        gpu_lease: GpuLease | None,
        module: str = RANK,
        *,
        ports: range | None = None,
    ) -> None:
        """`ports`: those on which the ranks may meet (weights.ports); None: any."""
        self._count = count
        self._module = module
        self._on_event = on_event
        self._environment = environment
        self._gpu_lease = gpu_lease
        self._ports = ports
        self.ranks: list[RankProcess] = []
        self._port: ReservedPort | None = None
        """The port on which the ranks meet. Rank 0 listens on it once it has loaded its code."""
        self._reading: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[RpcError] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start every rank. Return once they have loaded their code; they use no device before `work`.

        Raises:
            ChildError: a rank didn't start, or there is no port for the ranks to meet on.
        """
        try:
            self._port = reserve_port(LOOPBACK, self._ports)
        except NoFreePort as error:
            raise ChildError(str(error)) from error
        rendezvous = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self._port.number), "WORLD_SIZE": str(self._count)}
        if sys.platform == "linux":
            # All ranks are on this machine, and gloo has no authentication: bind it to the loopback interface.
            rendezvous["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        for number in range(self._count):
            child = await Child.start(
                self._module,
                env={**self._environment, **rendezvous, "RANK": str(number), "LOCAL_RANK": str(number)},
                name=f"rank {number}",
                gpu_lease=self._gpu_lease,
            )
            trainer = trainer_pb2_grpc.TrainerStub(child.channel)
            control = rank_pb2_grpc.RankStub(child.channel)
            broadcasts = RequestStream(control.BroadcastVersions, f"BroadcastVersions of {child.name}")
            self.ranks.append(RankProcess(number, child, trainer, control, broadcasts))
            child.exited.add_done_callback(lambda _, child=child: self._exited(child))  # type: ignore[misc]
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*(rank.child.wait_connected() for rank in self.ranks))
        except TimeoutError:
            raise ChildError(f"a rank did not start within {START_SECONDS:g} s") from None

    def work(self, request: rank_pb2.WorkRequest) -> None:
        """Have every rank train."""
        self._reading = [asyncio.create_task(self._read(rank, request)) for rank in self.ranks]

    async def failed(self) -> RpcError:
        """Wait until a rank fails or dies; return the error.

        It is an InvalidArgument if the settings or the model are wrong, so that another start would fail, too.
        """
        return await asyncio.shield(self._failure)

    async def kill(self) -> None:
        """Kill all ranks and wait until they have exited."""
        for task in self._reading:
            task.cancel()
        for rank in self.ranks:
            rank.child.kill()
        if self.ranks:
            await asyncio.wait({asyncio.ensure_future(asyncio.shield(rank.child.exited)) for rank in self.ranks})
        if self._port is not None:
            self._port.close()

    async def _read(self, rank: RankProcess, request: rank_pb2.WorkRequest) -> None:
        """Read the events of a rank until it ends."""
        try:
            async for event in rank.control.Work(request, timeout=None):
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
        code, last = ended.exit_code, ended.last_lines[-1:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._fail(ChildError(f"{child.name} {how}" + (f": {last[0]}" if last and code > 0 else "")))

    def _fail(self, error: RpcError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)
