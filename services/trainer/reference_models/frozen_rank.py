"""One rank of a frozen model's replica, a child process of the service, and the commands that its ranks call
together.

Rank 0 takes groups from the board and sends their packed tokens to the other ranks; all of them run the model.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relaxd.algorithms import create
from relaxd.board import REFERENCE_WEIGHTS, STUDENT_CANDIDATES, TEACHER_PROMPT_TOKENS, Board, stages_for
from relaxd.config import RunConfig, TrainerConfig
from relaxd.models.folders import frozen_models, resolve_model
from relaxd.process.child_server import ChildServer
from relaxd.process.upkeep import freeze_objects
from relaxd.roles import ROLES
from relaxd.v1 import rank_pb2 as pb
from relaxd.v1 import rank_pb2_grpc
from services.trainer.batch.groups import model_of
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.learner.forward import Forward
from services.trainer.learner.frozen_model import FrozenModel
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.channels import RankChannel
from services.trainer.megatron.rank_messages import command
from services.trainer.megatron.world import World
from services.trainer.model.architectures import read_architecture
from services.trainer.reference_models.followed_folder import LedgerWeights
from services.trainer.reference_models.model_rank import ModelRank, ModelStage, world_config

logger = logging.getLogger(__name__)

Models = Mapping[str, FrozenModel]
"""This rank's frozen models, by name."""


@command
def compute_columns(
    models: Models, name: str, micro_batches: Sequence[PackedMicroBatch]
) -> list[dict[str, NDArray[Any]]]:
    """Run the model `name` on micro-batches. Return the computed columns of each."""
    return models[name].compute(micro_batches)


@command
def take_over(models: Models, folder: Path) -> None:
    """Load the weights of a Hugging Face folder into this rank's only model. Raises ModelError, ModelFileError."""
    (model,) = models.values()
    model.load(folder)


class FrozenModelRank(ModelRank):
    """A rank of a reference or teacher replica."""

    def _compute(self, request: pb.WorkRequest, config: RunConfig) -> None:
        trainer = world_config(config, request.role)
        report = self._report_loading if self._thread.number == 0 else None
        stages = {stage.name: stage for stage in stages_for(config)}
        own_stage = stages[ROLES[request.role].stage]
        models = _load_models(config, trainer, request.role, own_stage.writes, report)
        world = next(iter(models.values())).forward.world
        freeze_objects()
        channel = RankChannel(trainer.collective_timeout_seconds, world.disk)
        if self._thread.number != 0:
            while True:
                function, arguments = channel.receive()
                function(models, *arguments)

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            channel.send((function, arguments))
            return function(models, *arguments)

        def compute(name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
            self._report_progress()
            found: list[dict[str, NDArray[Any]]] = run(compute_columns, name, micro_batches)
            return found

        visions = {name: model.forward.vision for name, model in models.items()}
        board = Board(request.redis, request.run_id, tuple(stages.values()), config.board)
        candidates = create(config.algorithm).needs.candidates
        of_student = candidates.top_k if candidates is not None and STUDENT_CANDIDATES in own_stage.needs else 0
        self._stage = stage = ModelStage(
            board,
            request.role,
            request.replica_id,
            compute,
            vocab_sizes={name: model.forward.architecture.vocab_size for name, model in models.items()},
            model_of=partial(model_of, config, request.role),
            prompt=TEACHER_PROMPT_TOKENS if TEACHER_PROMPT_TOKENS in own_stage.needs else "prompt_tokens",
            temperature=config.rollout.temperature,
            micro_batch_tokens=trainer.micro_batch_tokens,
            of_student=of_student,
            media={name: vision.tokens for name, vision in visions.items() if vision} if config.has_media else {},
            pipeline_stages=trainer.pipeline_parallel,
            of_each=lambda: {} if weights is None else {REFERENCE_WEIGHTS: weights.weights},
            on_failure=self._thread.fail,
        )

        def loading(detail: str) -> None:
            stage.turns += 1
            self._report_progress(detail)

        def still_waiting(path: Path) -> None:
            loading(f"waiting for {path}")
            channel.tick()

        world.disk.report = loading
        weights: LedgerWeights | None = None
        if REFERENCE_WEIGHTS in own_stage.writes:
            (initial,) = (model.forward.folder for model in models.values())
            weights = LedgerWeights(board, Path(request.folder), initial, partial(run, take_over), still_waiting)
            weights.follow()
        stage.worker.start()
        self._thread.events.put(pb.WorkResponse(loaded=pb.RankLoaded()))
        while True:
            if weights is not None:
                weights.follow()
            stage.run(TICK_SECONDS)
            channel.tick()
            self._report_progress()


def _load_models(
    config: RunConfig,
    trainer: TrainerConfig,
    role: str,
    columns: Collection[str],
    report: Callable[[str], None] | None,
) -> dict[str, FrozenModel]:
    """Load a role's frozen models, by name, into one Megatron world with the settings of `trainer`."""
    trained = read_architecture(resolve_model(config.model.path, weights=False)).vocab_size
    needs = create(config.algorithm).needs
    models: dict[str, FrozenModel] = {}
    world: World | None = None
    for name, folder in frozen_models(config, role).items():
        forward = Forward(folder, trainer, seed=config.run.seed, report=report, world=world)
        world = forward.world
        forward.check_media(config)
        models[name] = FrozenModel(role, forward, needs, columns, trained)
    return models


if __name__ == "__main__":
    ChildServer((rank_pb2_grpc.add_RankServicer_to_server, FrozenModelRank())).serve()
