"""Turns on the GPUs of a colocated run."""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.coordinator_pb2 import TakeTurnRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.waiting import waiting

CALL_SECONDS = 5.0
ASK_AGAIN_SECONDS = 0.25
WARN_SECONDS = 10.0
"""Pause between two warnings about a coordinator that does not answer."""

logger = logging.getLogger(__name__)


async def wait_for_turn(coordinator: CoordinatorStub, replica_id: str, on_wait: Callable[[str], None]) -> None:
    """Wait until the coordinator grants this replica the device. It must have no children now.

    `on_wait` is called with the reason before each further attempt. Waits without a deadline, also while the
    coordinator is away: cancel it when the run ends.
    """
    warned = 0.0
    with waiting("its turn on the device") as wait:
        while True:
            try:
                answer = await coordinator.TakeTurn(TakeTurnRequest(replica_id=replica_id), timeout=CALL_SECONDS)
                if answer.granted:
                    return
                wait.reason = f"its turn on the device: {answer.reason}"
            except grpc.aio.AioRpcError as error:
                wait.reason = f"its turn on the device: the coordinator does not answer: {explain(error)}"
                if time.monotonic() - warned > WARN_SECONDS:
                    warned = time.monotonic()
                    logger.warning("waiting for %s", wait.reason)
            on_wait(f"waiting for {wait.reason}")
            await asyncio.sleep(ASK_AGAIN_SECONDS)
