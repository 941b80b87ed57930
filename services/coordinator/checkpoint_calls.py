"""The calls of the Coordinator that are about checkpoints and about runs that Redis has lost."""

from typing import Any

import grpc

from relaxd.rpc.errors import FailedPrecondition, Unavailable, Violations, explain
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.trainer_pb2 import TrainerSaveCheckpointRequest
from services.coordinator.manager import RunManager
from services.coordinator.patience import LONG_CALL_SECONDS, NoAnswer, answer
from services.coordinator.peers import Peers
from services.coordinator.starting import check_run_id


class CheckpointCalls:
    """The part of the Coordinator's servicer that is about checkpoints."""

    _manager: RunManager
    _peers: Peers

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:
        """Let the trainer take a checkpoint, within the caller's deadline; the trainer keeps the run's own limit."""
        violations = Violations()
        check_run_id(request.run_id, violations)
        violations.raise_if_any()
        active = self._manager.require_active(request.run_id)
        trainer = active.fleet.trainer()
        if trainer is None:
            raise Unavailable("no trainer is ready")
        stub = self._peers.trainer(trainer.registration.address)
        try:
            with active.trainer_awake():
                call = stub.SaveCheckpoint(TrainerSaveCheckpointRequest(), timeout=LONG_CALL_SECONDS)
                saved = await answer(call, trainer, active.fleet.registry)
        except NoAnswer as error:
            raise Unavailable(str(error)) from error
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise FailedPrecondition(error.details() or "the trainer refuses") from error
            raise Unavailable(f"{trainer.replica_id}: {explain(error)}") from error
        return pb.SaveCheckpointResponse(path=saved.path, weights=saved.weights)

    async def RestoreRun(self, request: pb.RestoreRunRequest, context: Any) -> pb.RestoreRunResponse:
        """Take up a run from its folder."""
        active = await self._manager.restore(request.folder)
        return pb.RestoreRunResponse(run=await self._manager.message(active.record))
