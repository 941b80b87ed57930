"""The model of a run that ends, as a Hugging Face folder."""

import time

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.replica_pb2 import ROLE_TRAINER
from relaxd.v1.trainer_pb2 import ExportHuggingFaceRequest
from services.coordinator.fleet import Fleet
from services.coordinator.patience import LONG_CALL_SECONDS, NoAnswer, answer
from services.coordinator.peers import Peers

LOOK_SECONDS = 1.0
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses of a trainer that may be back soon."""
EXPORT_FOLDER = "model"


class ExportFailed(Exception):
    """The trainer did not write the model."""


async def export_model(fleet: Fleet, peers: Peers, *, away_seconds: float) -> str:
    """Let the trainer write the model, however long that takes; returns its path.

    A trainer that starts anew is waited for. Raises ExportFailed: none has been registered for `away_seconds`, or it
    refuses.
    """
    problem = "no trainer is there"
    seen = time.monotonic()
    while (failure := fleet.failure()) is None and time.monotonic() - seen <= away_seconds:
        if fleet.has(ROLE_TRAINER):
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
        await fleet.registry.changed.wait(LOOK_SECONDS)
    raise ExportFailed(failure or problem)
