"""Coordinators of tests, which tell of replicas what a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from relaxd.v1.coordinator_pb2 import CallableReplica, WatchReplicasResponse


async def watch_replicas(replicas: Callable[[], Sequence[CallableReplica]]) -> AsyncIterator[WatchReplicasResponse]:
    """Yield all replicas now, and whenever they are others."""
    number, sent = 0, None
    while True:
        if (now := list(replicas())) != sent:
            number, sent = number + 1, now
            yield WatchReplicasResponse(change=number, complete=True, replicas=now)
        await asyncio.sleep(0.01)
