"""Waiting for a colocated run's device before children are started on it."""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.coordinator_pb2 import TakeTurnRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub

CALL_SECONDS = 5.0
ASK_AGAIN_SECONDS = 0.25
COMPLAIN_SECONDS = 10.0

logger = logging.getLogger(__name__)


async def wait_for_turn(coordinator: CoordinatorStub, replica_id: str, told: Callable[[str], None]) -> None:
    """Return when the coordinator says that the device is this replica's; it has no children now.

    `told` hears why it isn't yet. Waits as long as it takes, through absences of the coordinator: cancel it when the
    run ends.
    """
    complained = 0.0
    while True:
        try:
            answer = await coordinator.TakeTurn(TakeTurnRequest(replica_id=replica_id), timeout=CALL_SECONDS)
            if answer.granted:
                return
            reason = f"waiting for its turn on the device: {answer.reason}"
        except grpc.aio.AioRpcError as error:
            reason = f"the coordinator gives no turn on the device: {explain(error)}"
            if time.monotonic() - complained > COMPLAIN_SECONDS:
                complained = time.monotonic()
                logger.warning("%s", reason)
        told(reason)
        await asyncio.sleep(ASK_AGAIN_SECONDS)
