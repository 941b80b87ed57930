"""The coordinator as replicas of a rehearsal see it: how long it takes to answer them, in a file."""

import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from relaxd.tools.rehearsal.control_plane import line
from relaxd.v1.coordinator_pb2 import HeartbeatRequest, LeaseGpusRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub


class TimedCoordinator:
    """A coordinator's stub that writes a line for every answered heartbeat and GPU lease (control_plane.py)."""

    def __init__(self, stub: CoordinatorStub, path: Path) -> None:
        self._stub = stub
        self._file = path.open("a", buffering=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def Heartbeat(self, request: HeartbeatRequest, timeout: float) -> Any:
        """Send a heartbeat."""
        return await self._timed("Heartbeat", self._stub.Heartbeat(request, timeout=timeout))

    async def LeaseGpus(self, request: LeaseGpusRequest, timeout: float) -> Any:
        """Lease GPUs."""
        return await self._timed("LeaseGpus", self._stub.LeaseGpus(request, timeout=timeout))

    async def _timed(self, name: str, call: Awaitable[Any]) -> Any:
        sent = time.monotonic()
        answer = await call
        self._file.write(line(name, sent, time.monotonic() - sent))
        return answer
