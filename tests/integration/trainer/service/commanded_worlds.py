"""Worlds of two processes in which rank 0 commands and the other rank follows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.megatron.rank_messages import message
from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, make_samples
from tests.kit.waiting import wait_until


@dataclass(frozen=True)
class CommandJob:
    """Every command that needs no board, on a model in two halves."""

    model: Path
    folder: Path


class Ended(Exception):
    """The last command was executed."""


@message
@dataclass(frozen=True)
class Accumulate:
    """Run forward and backward of made-up samples."""

    def execute(self, rank: Any) -> None:
        from services.trainer.batch.micro_batch import pack

        rank.learner.accumulate([pack(make_samples())])


@message
@dataclass(frozen=True)
class End:
    """End `TrainingRank.follow`, which otherwise ends with its process."""

    def execute(self, rank: Any) -> None:
        raise Ended


def run_job(job: CommandJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    from services.trainer.checkpoints.rank_part import CheckpointPart
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
            result = command(rank, job.folder)
            rank.run(End())
        else:
            rank.follow()
    except Ended:
        pass
    result |= {"step": learner.step, "tensors": copied(learner)}
    from services.trainer.megatron.world import leave_layout

    leave_layout()
    return result


def command(rank: Any, folder: Path) -> dict[str, Any]:
    """Rank 0's part."""
    from services.trainer.loop import commanded_rank, training_commands
    from services.trainer.megatron.channels import TICK

    rank.run(Accumulate())
    rank.run(training_commands.Discard())
    rank.run(Accumulate())
    first, at_1 = rank.run(training_commands.Update(20.0)), rank.run(training_commands.EndStep())
    rank.channel.send(TICK)
    checkpoint, abandoned, refused = folder / "checkpoint", folder / "abandoned", folder / "refused"
    checkpoint.mkdir()
    abandoned.mkdir()
    saved, _ = rank.run(commanded_rank.BeginCheckpoint(checkpoint))
    wait_until(lambda: rank.checkpoint.reports() is not None, "both ranks have written")
    rank.run(commanded_rank.EndCheckpoint())
    rank.run(Accumulate())
    slept = rank.run(training_commands.OffloadState(to_host=True))
    woken = rank.run(training_commands.OffloadState(to_host=False))
    second, at_2 = rank.run(training_commands.Update(20.0)), rank.run(training_commands.EndStep())
    rank.run(commanded_rank.Restore(checkpoint, 1, same_layout=True))
    restored, _ = rank.run(commanded_rank.BeginCheckpoint(abandoned))
    rank.run(commanded_rank.EndCheckpoint())
    refused.mkdir()
    (refused / "rank-00001-0.safetensors").mkdir()  # where a file should go
    rank.run(commanded_rank.BeginCheckpoint(refused))
    wait_until(lambda: rank.checkpoint.reports() is not None, "both ranks have ended")
    reports = rank.checkpoint.reports()
    rank.run(commanded_rank.EndCheckpoint())
    return {
        "refused": reports[1]["error"],
        "steps": [first.step, second.step],
        "checksums": [at_1, saved, at_2, restored],
        "memory": [*slept, *woken],
        "exported": rank.run(training_commands.Export(folder / "export")),
    }
