"""The model of a run that ends, as a Hugging Face folder."""

import asyncio

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.trainer_pb2 import ExportHuggingFaceRequest
from services.coordinator.fleet import Fleet
from services.coordinator.peers import Peers

EXPORT_SECONDS = 24 * 3600.0
"""Writing a large model takes as long as the disk takes. A trainer that gets nothing done fails by itself."""
TRAINER_WAIT_SECONDS = 120.0
"""How long a trainer that is restarting is waited for."""
EXPORT_FOLDER = "model"


class ExportFailed(Exception):
    """The trainer did not write the model."""


async def export_model(fleet: Fleet, peers: Peers) -> str:
    """Let the trainer write the model; returns its path. Raises ExportFailed."""
    problem = "no trainer is ready"
    deadline = asyncio.get_running_loop().time() + TRAINER_WAIT_SECONDS
    while asyncio.get_running_loop().time() < deadline and fleet.failure() is None:
        trainer = fleet.trainer()
        if trainer is not None:
            try:
                stub = peers.trainer(trainer.registration.address)
                request = ExportHuggingFaceRequest(folder=EXPORT_FOLDER)
                return (await stub.ExportHuggingFace(request, timeout=EXPORT_SECONDS)).path
            except grpc.aio.AioRpcError as error:
                problem = explain(error)
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    break
        await asyncio.sleep(1.0)
    raise ExportFailed(fleet.failure() or problem)
