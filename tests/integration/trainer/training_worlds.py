"""Whole runs of the training loop without the service around it, in this process or in worlds of several ranks.

The groups wait on a real board before a run begins; the run ends with its last version.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaxd.config import RunConfig
from services.trainer.megatron.rank_messages import command
from tests.integration.trainer.service_kit import RUN_ID
from tests.integration.trainer.trainer_worlds import copied


@dataclass(frozen=True)
class RunJob:
    """A run, or its continuation by the next trainer."""

    config: RunConfig
    redis_url: str
    folder: Path
    drain_at: str = ""
    """What rank 0 is doing when it is asked to hand its groups back; the run ends then."""
    on_version: Callable[[int], None] | None = None
    """Rank 0 calls it with each version that it announces."""


class Done(Exception):
    """The last version was announced."""


@command
def end(rank: Any) -> None:
    """End `TrainingRank.follow`, which otherwise ends with its process."""
    raise Done


def run_job(job: RunJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank.

    Returns:
        This rank's tensors, and on rank 0 what the ledger has.
    """
    from relaxd.algorithms import create
    from relaxd.board import Board, stages_for
    from relaxd.models.folders import models_in_trainer
    from services.trainer.learner.learner import Learner
    from services.trainer.loop.commanded_rank import CheckpointPart
    from services.trainer.loop.round_runner import RoundRunner
    from services.trainer.loop.step_profiler import ProfilePlan, step_profiler
    from services.trainer.loop.thread_requests import Controls
    from services.trainer.loop.training_commands import TrainingRank
    from services.trainer.loop.training_queue import TrainingQueue
    from services.trainer.loop.training_thread import Training
    from services.trainer.loop.weight_read_lock import WeightReadLock
    from services.trainer.megatron.channels import ModelParallelChannel, RankChannel

    config = job.config
    algorithm = create(config.algorithm)
    learner = Learner(
        Path(config.model.path),
        config.trainer,
        config.algorithm,
        steps=config.run.steps,
        seed=config.run.seed,
        critic=config.roles.critic,
        frozen=models_in_trainer(config),
    )
    board = Board(job.redis_url, RUN_ID, stages_for(config), config.board)
    rank = TrainingRank(
        RankChannel(60.0, learner.world.disk),
        learner,
        CheckpointPart(learner),
        board,
        job.folder,
        runner=RoundRunner(learner, config),
        sharing=ModelParallelChannel(learner.world.dp_rank, 60.0),
        profiler=step_profiler(config, learner.world.rank, job.folder),
    )
    intake, result = None, {}
    try:
        if learner.world.rank != 0:
            rank.follow()
        weights = WeightReadLock(board.new_trainer_term())
        intake = TrainingQueue(
            board,
            f"trainer-{weights.term}",
            config,
            routing=learner.routing,
            media=learner.media_tokens,
            vocab_sizes=learner.vocab_sizes,
        )

        controls = Controls()

        def emit(event: Any) -> None:
            if job.drain_at and event.progress.detail == job.drain_at:
                controls.draining.set()
            if event.progress.detail == "drained":
                raise Done
            if event.HasField("version"):
                if job.on_version is not None:
                    job.on_version(event.version.weights.version)
                if event.version.weights.version == config.run.steps:
                    raise Done

        Training(
            config=config,
            run_id=RUN_ID,
            rank=rank,
            intake=intake,
            algorithm=algorithm,
            weights=weights,
            controls=controls,
            profiles=ProfilePlan(config),
            emit=emit,
        ).run()
    except Done:
        if learner.world.rank == 0:
            rank.channel.send((end, (), {}))
            result = {"ledger": board.ledger(), "optimizer_steps": learner.optimizer_steps}
    finally:
        if intake is not None:
            intake.release_all()
            intake.close()
        board.close()
    result |= {"tensors": copied(learner)}
    from tests.kit.megatron_world import leave_layout

    leave_layout()
    return result
