"""One rank of a reference replica: a child process of the service.

Rank 0 takes groups from the board and sends their packed tokens to the other ranks; all of them run the model.
"""

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd import telemetry
from relaxd.board import Board, stages_for
from relaxd.config import RunConfig, TrainerConfig
from relaxd.data.models import resolve_model
from relaxd.process.json_child_server import JsonChildServer
from relaxd.roles import REFERENCE
from services.trainer.batch.row_packing import PackedMicroBatch
from services.trainer.learner.forward import Forward
from services.trainer.megatron.host_memory import freeze_objects
from services.trainer.megatron.rank_channel import TICK_SECONDS, RankChannel
from services.trainer.reference.stage import ReferenceStage

logger = logging.getLogger(__name__)


class ReferenceRank:
    """The rank process: handlers of the parent's requests, and the thread that computes."""

    def __init__(self) -> None:
        self._number = int(os.environ.get("RANK", "0"))
        self._stage: ReferenceStage | None = None
        self._server = JsonChildServer(
            {"start": self._start, "pause": self._pause, "resume": self._resume, "drain": self._drain}
        )

    def serve(self) -> None:
        """Answer requests until the parent exits."""
        self._server.serve()

    def _start(self, params: dict[str, Any]) -> None:
        telemetry.setup_logging(f"{params['replica_id']}/rank{self._number}", params["log_level"])
        logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
        telemetry.setup(REFERENCE, params["replica_id"])
        threading.Thread(target=self._work, args=(params,), name="reference", daemon=True).start()

    def _work(self, params: dict[str, Any]) -> None:
        """Run the thread that computes. Any error ends the process, and the replica with it."""
        try:
            self._compute(params)
        except BaseException as error:
            logger.exception("rank %d failed", self._number)
            self._fail(f"{type(error).__name__}: {error}")
            telemetry.shutdown()
            os._exit(1)

    def _compute(self, params: dict[str, Any]) -> None:
        config = RunConfig.model_validate_json(params["config"])
        trainer = world_config(config)
        report = self._report_loading if self._number == 0 else None
        forward = Forward(resolve_model(config.model.path), trainer, seed=config.run.seed, report=report)
        model = forward.load().requires_grad_(False)
        freeze_objects()
        channel = RankChannel(trainer.collective_timeout_seconds, forward.world.disk)
        if self._number != 0:
            while True:
                forward.log_probs(model, channel.receive())

        def compute(micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
            self._report_progress()
            channel.send(micro_batches)
            return forward.log_probs(model, micro_batches)

        board = Board(params["redis"], params["run_id"], stages_for(config), config.board)
        self._stage = stage = ReferenceStage(
            board,
            params["replica_id"],
            compute,
            temperature=config.rollout.temperature,
            micro_batch_tokens=trainer.micro_batch_tokens,
            pipeline_stages=trainer.pipeline_parallel,
            on_failure=self._fail,
        )
        stage.worker.start()
        self._server.emit("loaded", {})
        while True:
            stage.run(TICK_SECONDS)
            channel.tick()
            self._report_progress()

    def _report_loading(self, detail: str) -> None:
        self._server.emit("loading", {"detail": detail})

    def _report_progress(self) -> None:
        if (stage := self._stage) is not None:
            counts = {"held": stage.worker.held, "done": stage.worker.done, "turns": stage.turns}
            self._server.emit("progress", counts)

    def _fail(self, reason: str) -> None:
        self._server.emit("failed", {"reason": reason})

    def _pause(self, params: dict[str, Any]) -> None:
        if self._stage is not None:
            self._stage.worker.pause()

    def _resume(self, params: dict[str, Any]) -> None:
        if self._stage is not None:
            self._stage.worker.resume()

    def _drain(self, params: dict[str, Any]) -> int:
        """Finish held groups in time and hand back the others. Returns how many are still held."""
        if self._stage is None:
            return 0
        self._stage.worker.drain(params["seconds"])
        telemetry.flush()  # the parent kills the ranks next
        return self._stage.worker.held


def world_config(config: RunConfig) -> TrainerConfig:
    """Return the trainer's configuration with the parallel sizes of a reference replica."""
    own = config.roles.reference
    return config.trainer.model_copy(
        update={
            "ranks": own.ranks,
            "tensor_parallel": own.tensor_parallel,
            "pipeline_parallel": own.pipeline_parallel,
            "context_parallel": own.context_parallel,
            "expert_parallel": own.expert_parallel,
            "micro_batch_tokens": own.micro_batch_tokens or config.trainer.micro_batch_tokens,
            "threads": own.threads,
            "recompute": "none",
        }
    )


if __name__ == "__main__":
    ReferenceRank().serve()
