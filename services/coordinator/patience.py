"""Waiting for a replica's answer for as long as it takes, as long as the replica works on it."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from services.coordinator.registry import Registry, Replica

Result = TypeVar("Result")

LONG_CALL_SECONDS = 7 * 86400.0
"""Deadline of calls whose length nobody knows: `answer` gives them up long before, if nothing comes of them."""
LOOK_SECONDS = 0.5


class NoAnswer(Exception):
    """The replica is gone, or does nothing."""


async def answer(
    call: Awaitable[Result], replica: Replica, registry: Registry, stall_seconds: float = float("inf")
) -> Result:
    """Await a call of a replica while the replica is registered and its status.progress moves at least every
    `stall_seconds`; then cancel it.

    Raises NoAnswer, and whatever the call raises.
    """
    task = asyncio.ensure_future(call)
    progress, silent, last = replica.status.progress, 0.0, time.monotonic()
    try:
        while True:
            await asyncio.wait({task}, timeout=LOOK_SECONDS)
            if task.done():
                return task.result()
            now = time.monotonic()
            silent += min(now - last, 2 * LOOK_SECONDS)  # not the time in which this process itself stood still
            last = now
            current = registry.get(replica.replica_id)
            if current is None:
                raise NoAnswer(f"{replica.replica_id} is gone")
            if current.status.progress != progress:
                progress, silent = current.status.progress, 0.0
            elif silent > stall_seconds:
                raise NoAnswer(f"{replica.replica_id} has got nothing done for {silent:.0f} s")
    finally:
        task.cancel()
