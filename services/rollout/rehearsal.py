"""`python -m services.rollout.rehearsal COUNT GPUS FILE`: runs COUNT rollout replicas in one process, for `relaxd
rehearse`, and measures their calls.

Each replica has its own gRPC server, registration, heartbeats, connections to Redis and threads, as in a separate
process, and GPUS simulated GPUs, which it leases like real ones. The replicas share the interpreter and the event loop,
so their engine must need no time: "scripted". The times of their heartbeats and leases are appended to FILE.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from relaxd.replica.gpus import Gpu, GpuLeases
from relaxd.replica.replica_service import ReplicaContext, open_context
from relaxd.rpc.service_settings import parse_settings
from relaxd.tools.rehearsal.capacity import line
from relaxd.v1.coordinator_pb2 import HeartbeatRequest, LeaseGpusRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from services.rollout.service.server import run_rollout


class TimedCoordinator:
    """Coordinator stub that also writes each heartbeat's and GPU lease's response time to a file (see capacity.py)."""

    def __init__(self, stub: CoordinatorStub, path: Path) -> None:
        self._stub = stub
        self._file = path.open("a", buffering=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def Heartbeat(self, request: HeartbeatRequest, timeout: float) -> Any:
        """Send a heartbeat to the coordinator, and write its response time."""
        return await self._timed("Heartbeat", self._stub.Heartbeat(request, timeout=timeout))

    async def LeaseGpus(self, request: LeaseGpusRequest, timeout: float) -> Any:
        """Lease GPUs from the coordinator, and write its response time."""
        return await self._timed("LeaseGpus", self._stub.LeaseGpus(request, timeout=timeout))

    async def _timed(self, name: str, call: Awaitable[Any]) -> Any:
        sent = time.monotonic()
        answer = await call
        self._file.write(line(name, sent, time.monotonic() - sent))
        return answer


THREADS = 64
"""Number of threads for the replicas' short calls to Redis."""


async def _replica(process: ReplicaContext, coordinator: CoordinatorStub, number: int, gpus: int) -> None:
    name = f"{process.settings.replica_id}-{number}"
    settings = replace(process.settings, replica_id=name, instance=name, port=0)
    visible = [Gpu(f"GPU-{name}-{index}", index) for index in range(gpus)]
    await run_rollout(ReplicaContext(settings, coordinator, GpuLeases(name, visible, coordinator), process.stop))


async def main(count: int, gpus: int, calls: Path) -> None:
    """Run `count` rollout replicas with `gpus` simulated GPUs each until they are stopped."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="shared"))
    async with open_context(parse_settings("rollout", [])) as process:
        coordinator = cast(CoordinatorStub, TimedCoordinator(process.coordinator, calls))
        await asyncio.gather(*(_replica(process, coordinator, number, gpus) for number in range(1, count + 1)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
