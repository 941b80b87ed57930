"""One rank of a replica that holds a model and works on a stage: a child process of the service."""

from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from relaxd import telemetry
from relaxd.config import RunConfig, TrainerConfig
from relaxd.v1 import rank_pb2 as pb
from relaxd.v1 import rank_pb2_grpc
from services.trainer.loop.commanded_rank import RankThread
from services.trainer.reference_models.model_stage import ModelStage


class ModelRank(rank_pb2_grpc.RankServicer):
    """The rank's handlers, and the thread that computes. It has no weights to hold or send: those calls are refused.

    A subclass says what is computed.
    """

    def __init__(self) -> None:
        self._thread = RankThread()
        self._stage: ModelStage | None = None
        self._reported = pb.RankProgress()

    async def Work(self, request: pb.WorkRequest, context: Any) -> AsyncIterator[pb.WorkResponse]:
        """Start the thread that computes and stream its events."""
        self._thread.start(request, self._compute)
        async for event in self._thread.events:
            yield event

    def SetPaused(self, request: pb.SetPausedRequest, context: Any) -> pb.SetPausedResponse:
        """Stop or resume taking groups."""
        if self._stage is not None:
            (self._stage.worker.pause if request.paused else self._stage.worker.resume)()
        return pb.SetPausedResponse()

    def HandBackGroups(self, request: pb.HandBackGroupsRequest, context: Any) -> pb.HandBackGroupsResponse:
        """Finish held groups in time and hand back the others."""
        if self._stage is not None:
            self._stage.worker.drain(request.seconds)
            self._clean_up()
            telemetry.flush()  # the parent kills the ranks next
        return pb.HandBackGroupsResponse(done=self._stage is None or not self._stage.worker.held)

    def _clean_up(self) -> None:
        """Finish remaining work before the parent kills the ranks."""

    @abstractmethod
    def _compute(self, request: pb.WorkRequest, config: RunConfig) -> None:
        """Load the model, and work. Doesn't return."""

    def _report_loading(self, detail: str) -> None:
        self._thread.events.put(pb.WorkResponse(progress=pb.RankProgress(detail=detail)))

    def _report_progress(self, detail: str = "") -> None:
        if (stage := self._stage) is not None:
            progress = pb.RankProgress(
                detail=detail, held_groups=stage.worker.held, done_groups=stage.worker.done, iterations=stage.turns
            )
            if progress != self._reported:
                self._reported = progress
                self._thread.events.put(pb.WorkResponse(progress=progress))


def world_config(config: RunConfig, role: str) -> TrainerConfig:
    """Return the trainer's configuration with the parallel sizes of a replica of this role."""
    own = config.roles.sizes[role]
    return config.trainer.model_copy(
        update={
            "ranks": own.ranks,
            "hosts": 1,
            "tensor_parallel": own.tensor_parallel,
            "pipeline_parallel": own.pipeline_parallel,
            "pipeline_layers": (),
            "pipeline_chunks": 1,
            "context_parallel": own.context_parallel,
            "expert_parallel": own.expert_parallel,
            "micro_batch_tokens": own.micro_batch_tokens or config.micro_batch_tokens,
            "threads": own.threads,
            "recompute": "none" if role in config.roles.frozen else config.trainer.recompute,
        }
    )
