"""Worlds of two processes in which rank 0 commands and the other rank follows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.megatron.rank_messages import command
from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, make_samples
from tests.kit.waiting import wait_until


@dataclass(frozen=True)
class CommandJob:
    """Every command that needs no board, on a model in two halves."""

    model: Path
    folder: Path


class Ended(Exception):
    """The last command was executed."""


@command
def accumulate(rank: Any) -> None:
    """Run forward and backward of made-up samples."""
    from services.trainer.batch.micro_batch import pack

    rank.learner.accumulate([pack(make_samples())])


@command
def end(rank: Any) -> None:
    """End `TrainingRank.follow`, which otherwise ends with its process."""
    raise Ended


def run_job(job: CommandJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    from services.trainer.loop.commanded_rank import CheckpointPart
    from services.trainer.loop.training_commands import TrainingRank
    from services.trainer.megatron.channels import RankChannel

    learner = make_learner(Job(job.model, {"tensor_parallel": 2}), ranks)
    channel = RankChannel(60.0, learner.world.disk)
    nothing: Any = None
    parts = (channel, learner, CheckpointPart(learner), nothing, job.folder)
    rank = TrainingRank(*parts, runner=nothing, sharing=nothing, profiler=nothing)
    result: dict[str, Any] = {}
    try:
        if learner.world.rank == 0:
            result = run_commands(rank, job.folder)
            rank.run(end)
        else:
            rank.follow()
    except Ended:
        pass
    result |= {"step": learner.step, "tensors": copied(learner)}
    from tests.kit.megatron_world import leave_layout

    leave_layout()
    return result


def run_commands(rank: Any, folder: Path) -> dict[str, Any]:
    """Rank 0's part."""
    from services.trainer.loop import commanded_rank, training_commands
    from services.trainer.megatron.channels import TICK

    rank.run(accumulate)
    rank.run(training_commands.discard)
    rank.run(accumulate)
    first, at_1 = rank.run(training_commands.update, 20.0), rank.run(training_commands.end_step)
    rank.channel.send(TICK)
    checkpoint, abandoned, refused = folder / "checkpoint", folder / "abandoned", folder / "refused"
    checkpoint.mkdir()
    abandoned.mkdir()
    saved, _ = rank.run(commanded_rank.begin_checkpoint, checkpoint)
    wait_until(lambda: rank.checkpoint.reports() is not None, "both ranks have written")
    rank.run(commanded_rank.end_checkpoint)
    rank.run(accumulate)
    slept = rank.run(training_commands.offload_state, to_host=True)
    woken = rank.run(training_commands.offload_state, to_host=False)
    second, at_2 = rank.run(training_commands.update, 20.0), rank.run(training_commands.end_step)
    rank.run(commanded_rank.restore_checkpoint, checkpoint, 1, same_layout=True)
    restored, _ = rank.run(commanded_rank.begin_checkpoint, abandoned)
    rank.run(commanded_rank.end_checkpoint)
    refused.mkdir()
    (refused / "rank-00001-0.safetensors").mkdir()  # where a file should go
    rank.run(commanded_rank.begin_checkpoint, refused)
    wait_until(lambda: rank.checkpoint.reports() is not None, "both ranks have ended")
    reports = rank.checkpoint.reports()
    rank.run(commanded_rank.end_checkpoint)
    return {
        "refused": reports[1]["error"],
        "steps": [first.step, second.step],
        "checksums": [at_1, saved, at_2, restored],
        "memory": [*slept, *woken],
        "exported": rank.run(training_commands.export, folder / "export"),
    }
