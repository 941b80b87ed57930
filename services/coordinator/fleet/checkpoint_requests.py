"""Checkpoints on request."""

import grpc

from relaxd.rpc.errors import FailedPrecondition, ResourceExhausted, Unavailable, explain
from relaxd.v1.trainer_pb2 import TrainerSaveCheckpointRequest, TrainerSaveCheckpointResponse
from relaxd.waiting import waiting
from services.coordinator.fleet.run_context import RunContext
from services.coordinator.fleet.stall_limit import LONG_CALL_SECONDS, NoAnswer, answer


async def save_checkpoint(context: RunContext, *, rotate: bool) -> TrainerSaveCheckpointResponse:
    """Let the run's trainer save a checkpoint, however long that takes. Unless `rotate`, it is never removed.

    Raises Unavailable: no trainer is ready, or it is lost meanwhile; FailedPrecondition: the trainer refuses;
    ResourceExhausted: its disk does.
    """
    trainer = context.fleet.trainer()
    if trainer is None:
        raise Unavailable("no trainer is ready")
    stub = context.peers.trainer(trainer.registration.address)
    try:
        call = stub.SaveCheckpoint(TrainerSaveCheckpointRequest(rotate=rotate), timeout=LONG_CALL_SECONDS)
        with waiting("the trainer to save a checkpoint", on=trainer.replica_id):
            return await answer(call, trainer, context.registry)
    except NoAnswer as error:
        raise Unavailable(str(error)) from error
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            raise FailedPrecondition(error.details() or "the trainer refuses") from error
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise ResourceExhausted(error.details() or "the trainer's disk is full") from error
        raise Unavailable(f"{trainer.replica_id}: {explain(error)}") from error
