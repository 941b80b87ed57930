"""Export of a run's model as a Hugging Face folder."""

import time

import grpc

from relaxd.roles import TRAINER
from relaxd.rpc.errors import explain
from relaxd.v1.trainer_pb2 import ExportHuggingFaceRequest
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.stall_limit import LONG_CALL_SECONDS, NoAnswer, answer

POLL_SECONDS = 1.0
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses of a lost trainer, which may return."""
EXPORT_FOLDER = "model"


class ExportFailed(Exception):
    """The trainer did not export the model."""


async def export_model(fleet: Fleet, peers: Peers, *, away_seconds: float) -> str:
    """Let the trainer export the model, however long that takes; returns its path.

    Waits for a trainer that restarts. Raises ExportFailed: no trainer was registered for `away_seconds`, or it refuses.
    """
    problem = "no trainer is registered"
    seen = time.monotonic()
    while (failure := fleet.failure()) is None and time.monotonic() - seen <= away_seconds:
        if fleet.has(TRAINER):
            seen = time.monotonic()
        trainer = fleet.trainer()
        if trainer is not None:
            stub = peers.trainer(trainer.registration.address)
            request = ExportHuggingFaceRequest(folder=EXPORT_FOLDER)
            try:
                call = stub.ExportHuggingFace(request, timeout=LONG_CALL_SECONDS)
                return (await answer(call, trainer, fleet.registry)).path
            except NoAnswer as error:
                problem = str(error)
            except grpc.aio.AioRpcError as error:
                problem = explain(error)
                if error.code() not in PASSING:
                    break
        await fleet.registry.changed.wait(POLL_SECONDS)  # named: by the run's `_export`
    raise ExportFailed(failure or problem)
