"""One rank of the Megatron world: a child process of the trainer service.

Its place in the world comes from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, everything else from the parent's
"start" request. Training runs in its own thread; other threads answer requests.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict

from relaxd import telemetry
from relaxd.algorithms import create
from relaxd.board import Board, stages_for
from relaxd.config import RunConfig
from relaxd.data.models import resolve_model
from relaxd.process.json_child_server import HandlerError, JsonChildServer
from relaxd.weights.group import WeightGroupError, host_store
from relaxd.weights.manifest import to_proto
from services.trainer.learner.learner import Learner
from services.trainer.loop.broadcast import WeightBroadcaster, result_to_json, weight_buckets
from services.trainer.loop.checkpoints import CheckpointFailed
from services.trainer.loop.commands import Export, TrainingRank
from services.trainer.loop.controls import Controls, RequestQueue
from services.trainer.loop.intake import Intake
from services.trainer.loop.round_runner import RoundRunner
from services.trainer.loop.training import Training
from services.trainer.loop.weight_read_lock import HoldRefused, WeightReadLock
from services.trainer.megatron.host_memory import freeze_objects
from services.trainer.megatron.rank_channel import RankChannel

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Rank:
    """The rank process: handlers of the parent's requests, and the training thread."""

    def __init__(self) -> None:
        self._number = int(os.environ.get("RANK", "0"))
        self._controls = Controls()
        self._broadcaster: WeightBroadcaster | None = None
        self._weights: WeightReadLock | None = None
        self._server = JsonChildServer(
            {
                "start": self._start,
                "pause": lambda _: self._controls.paused.set(),
                "resume": lambda _: self._controls.paused.clear(),
                "drain": self._drain,
                "hold": self._hold,
                "release": self._release,
                "join_group": self._join_group,
                "leave_group": self._leave_group,
                "broadcast": self._broadcast,
                "export": self._export,
                "checkpoint": self._checkpoint,
                "sleep": self._sleep,
                "wake": self._wake,
            }
        )

    def serve(self) -> None:
        """Answer requests until the parent exits."""
        self._server.serve()

    def _start(self, params: dict[str, Any]) -> None:
        if params["paused"]:
            self._controls.paused.set()
        telemetry.setup_logging(f"{params['replica_id']}/rank{self._number}", params["log_level"])
        logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
        telemetry.setup("trainer", params["replica_id"])
        threading.Thread(target=self._work, args=(params,), name="training", daemon=True).start()

    def _work(self, params: dict[str, Any]) -> None:
        """Run the training thread. Any error ends the process; the parent then restarts the world."""
        try:
            self._train(params)
        except BaseException as error:
            logger.exception("rank %d failed", self._number)
            self._server.emit("failed", {"reason": f"{type(error).__name__}: {error}"})
            telemetry.shutdown()
            os._exit(1)

    def _train(self, params: dict[str, Any]) -> None:
        config = RunConfig.model_validate_json(params["config"])
        learner = Learner(
            resolve_model(config.model.path),
            config.trainer,
            config.algorithm,
            steps=config.run.steps,
            seed=config.run.seed,
            report=self._report_loading if self._number == 0 else None,
        )
        freeze_objects()
        algorithm = create(config.algorithm)
        buckets = weight_buckets(learner, config.weights.bucket_bytes)
        self._broadcaster = WeightBroadcaster(learner, buckets, config.rollout.engine)
        board = Board(params["redis"], params["run_id"], stages_for(config), config.board)
        gather = learner.world.gather
        gathers = gather.dense is not None or gather.experts is not None
        self._server.emit("loaded", {"source": gather.source, "stage": learner.world.pp_rank, "gathers": gathers})
        rank = TrainingRank(
            channel=RankChannel(config.trainer.collective_timeout_seconds, learner.world.disk),
            learner=learner,
            runner=RoundRunner(learner, algorithm, config.rollout.temperature),
            board=board,
            run_folder=Path(params["folder"]),
            board_timeout_seconds=config.trainer.collective_timeout_seconds / 2,
        )
        if self._number != 0:
            rank.follow()
        store = host_store(params["store_host"])
        term = board.new_trainer_term()
        self._weights = WeightReadLock(term)
        manifest = MessageToDict(to_proto(buckets))
        self._server.emit(
            "term",
            {"term": term, "manifest": manifest, "source_ranks": learner.world.pp_size, "store_port": store.port},
        )
        intake = Intake(
            board,
            params["replica_id"],
            groups_per_step=config.trainer.groups_per_step,
            max_staleness=config.board.max_staleness,
            max_sample_tokens=config.trainer.micro_batch_tokens,
            lease_seconds=config.board.lease_seconds,
        )
        Training(
            config=config,
            run_id=params["run_id"],
            term=term,
            rank=rank,
            intake=intake,
            algorithm=algorithm,
            weights=self._weights,
            controls=self._controls,
            emit=self._server.emit,
        ).run()

    def _report_loading(self, detail: str) -> None:
        """Report loading progress to the parent; later `Training` reports."""
        self._server.emit("progress", {"detail": detail, "held": 0, "done": 0, "iterations": 0})

    def _drain(self, params: dict[str, Any]) -> bool:
        self._controls.draining.set()
        drained = self._controls.drained.wait(params["seconds"])
        telemetry.flush()  # the end of a run kills the ranks right after
        return drained

    def _hold(self, params: dict[str, Any]) -> int:
        if self._weights is None:
            raise HandlerError("the trainer has no weights yet", kind="HoldRefused")
        try:
            return self._weights.acquire(params["term"], params["version"], params["seconds"])
        except HoldRefused as error:
            raise HandlerError(str(error), kind="HoldRefused") from error

    def _release(self, params: dict[str, Any]) -> bool:
        return self._weights is not None and self._weights.release(params["hold"])

    def _join_group(self, params: dict[str, Any]) -> None:
        try:
            self._require_broadcaster().join(**params)
        except WeightGroupError as error:
            raise HandlerError(str(error), kind="WeightGroupError") from error

    def _leave_group(self, params: dict[str, Any]) -> None:
        self._require_broadcaster().leave(params["name"])

    def _broadcast(self, params: dict[str, Any]) -> dict[str, Any]:
        try:
            return result_to_json(self._require_broadcaster().broadcast(**params))
        except WeightGroupError as error:
            raise HandlerError(str(error), kind="WeightGroupError") from error

    def _export(self, params: dict[str, Any]) -> int:
        export = Export(Path(params["folder"]))
        return self._ask(self._controls.requests, lambda training: training.rank.run(export), params["seconds"])

    def _checkpoint(self, params: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        answer = self._ask(self._controls.requests, lambda training: training.checkpoints.request(), params["seconds"])
        try:
            path, step = answer.result(params["seconds"] - (time.monotonic() - began))
        except CheckpointFailed as error:
            raise HandlerError(str(error), kind="CheckpointFailed") from error
        return {"path": path, "step": step}

    def _sleep(self, params: dict[str, Any]) -> dict[str, Any]:
        change = self._ask(self._controls.sleep_requests, lambda training: training.sleeping.sleep(), params["seconds"])
        return {"before": change.before_bytes, "after": change.after_bytes, "seconds": change.seconds}

    def _wake(self, params: dict[str, Any]) -> dict[str, Any]:
        change = self._ask(
            self._controls.sleep_requests,
            lambda training: training.sleeping.wake(params["metrics"]),
            params["seconds"],
        )
        return {"before": change.before_bytes, "after": change.after_bytes, "seconds": change.seconds}

    def _ask(self, requests: RequestQueue, action: Callable[[Training], T], seconds: float) -> T:
        try:
            return requests.ask(action, seconds)
        except TimeoutError as error:
            raise HandlerError(f"the training thread did not answer within {seconds:g} s", kind="Late") from error

    def _require_broadcaster(self) -> WeightBroadcaster:
        if self._broadcaster is None:
            raise HandlerError("this rank has no model yet", kind="WeightGroupError")
        return self._broadcaster


if __name__ == "__main__":
    Rank().serve()
