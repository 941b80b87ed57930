"""Calls of unknown length, limited by the replica's liveness and progress."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from services.coordinator.fleet.registry import Registry, Replica

Result = TypeVar("Result")

LONG_CALL_SECONDS = 7 * 86400.0
"""Deadline of calls of unknown length: `answer` cancels one without progress long before."""
POLL_SECONDS = 0.5


class NoAnswer(Exception):
    """The replica is gone, or makes no progress."""


async def answer(
    call: Awaitable[Result], replica: Replica, registry: Registry, stall_seconds: float = float("inf")
) -> Result:
    """Await a call to a replica; cancel it once the replica is gone or its status.progress stalls for `stall_seconds`.

    Raises NoAnswer, and whatever the call raises.
    """
    task = asyncio.ensure_future(call)
    progress, silent, last = replica.status.progress, 0.0, time.monotonic()
    try:
        while True:
            await asyncio.wait({task}, timeout=POLL_SECONDS)  # named: by the callers, of whom there may be many
            if task.done():
                return task.result()
            now = time.monotonic()
            silent += min(now - last, 2 * POLL_SECONDS)  # less the time in which this process itself was suspended
            last = now
            current = registry.get(replica.replica_id)
            if current is None:
                raise NoAnswer(f"{replica.replica_id} is gone")
            if current.status.progress != progress:
                progress, silent = current.status.progress, 0.0
            elif silent > stall_seconds:
                raise NoAnswer(f"{replica.replica_id} has made no progress for {silent:.0f} s")
    finally:
        task.cancel()
