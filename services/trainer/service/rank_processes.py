"""The rank processes of one Megatron world, as children of the service: started together, killed together."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from relaxd.process.child import ChildExit
from relaxd.process.gpu_lease import GpuLease
from relaxd.process.json_child import JsonChild

logger = logging.getLogger(__name__)

RankEvent = Callable[[int, str, dict[str, Any]], None]
"""Callback with rank, event name and event parameters."""

START_SECONDS = 60.0
"""Deadline of a child's first request; importing torch and Megatron takes seconds."""


class RankProcesses:
    """One set of rank processes. It isn't reused: if a rank dies, all are killed and a new set is started."""

    def __init__(
        self, count: int, on_event: RankEvent, environment: Mapping[str, str], gpu_lease: GpuLease | None
    ) -> None:
        self._count = count
        self._on_event = on_event
        self._environment = environment
        self._gpu_lease = gpu_lease
        self._children: list[JsonChild] = []
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for child in self._children]

    async def start(self, params: Mapping[str, Any]) -> None:
        """Start every rank and send it its start request.

        Raises:
            ChildError: a rank didn't start.
        """
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(self._count)}
        if sys.platform == "linux":
            # All ranks are on this machine, and gloo has no authentication: bind it to the loopback interface.
            rendezvous["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(self._count):
            self._children.append(
                await JsonChild.start(
                    "services.trainer.loop.rank",
                    env={**self._environment, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    name=f"rank {rank}",
                    on_event=lambda event, values, rank=rank: self._on_child_event(rank, event, values),  # type: ignore[misc]
                    gpu_lease=self._gpu_lease,
                )
            )
        for child in self._children:
            child.exited.add_done_callback(lambda future, name=child.name: self._exited(name, future))  # type: ignore[misc]
        await asyncio.gather(*(child.request("start", params, START_SECONDS) for child in self._children))

    async def failed(self) -> str:
        """Wait until a rank fails or dies; return the reason."""
        return await asyncio.shield(self._reason)

    async def request(self, rank: int, method: str, params: Mapping[str, Any], timeout: float) -> Any:
        """Send a request to one rank; see `JsonChild.request`."""
        return await self._children[rank].request(method, params, timeout)

    async def kill(self) -> None:
        """Kill all ranks and wait until they have exited."""
        for child in self._children:
            child.kill()
        if self._children:
            await asyncio.wait({asyncio.ensure_future(asyncio.shield(child.exited)) for child in self._children})

    def _on_child_event(self, rank: int, event: str, values: dict[str, Any]) -> None:
        if event == "failed":
            self._fail(f"rank {rank}: {values['reason']}")
        else:
            self._on_event(rank, event, values)

    def _exited(self, name: str, future: "asyncio.Future[ChildExit]") -> None:
        code = future.result().exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        last = future.result().last_lines[-1:]
        self._fail(f"{name} {how}" + (f": {last[0]}" if last and code > 0 else ""))

    def _fail(self, reason: str) -> None:
        if not self._reason.done():
            self._reason.set_result(reason)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
