"""A step of many tokens that is assembled in a world of two processes, whose learners only pretend to compute."""

import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.config import RunConfig
from services.trainer.loop.step_profiler import step_profiler
from services.trainer.megatron.rank_messages import command
from tests.integration.trainer.service_kit import RUN_ID

COLLECTIVE_SECONDS = 120.0
"""Deadline of a collective."""


@dataclass(frozen=True)
class AssemblyJob:
    """A step whose groups wait on the board."""

    config: RunConfig
    redis_url: str
    folder: Path
    bundle_bytes: int


class Ended(Exception):
    """The step is assembled."""


@command
def end(rank: Any) -> None:
    """End `TrainingRank.follow`, which otherwise ends with its process."""
    raise Ended


def run_job(job: AssemblyJob, ranks: int) -> dict[str, Any]:
    """Assemble the step on this rank.

    Returns:
        A checksum of each group's columns, and on rank 0 the memory that each command of the assembly took, and of each
        group whether the other ranks were free of collectives while its columns were prepared.
    """
    from relaxd.algorithms import create
    from relaxd.board import Board, stages_for
    from services.trainer.loop import step_phases
    from services.trainer.loop.commanded_rank import CheckpointPart
    from services.trainer.loop.round_runner import RoundRunner
    from services.trainer.loop.step_phases import StepBuilder
    from services.trainer.loop.training_commands import TrainingRank, assemble
    from services.trainer.loop.training_queue import TrainingQueue
    from services.trainer.megatron.channels import ModelParallelChannel, RankChannel
    from services.trainer.rehearsal import ScriptedLearner
    from tests.kit.megatron_world import leave_layout

    class Learner(ScriptedLearner):
        def values(self, micro_batches: Sequence[Any]) -> list[Any]:
            return [(batch.tokens * batch.loss_mask).astype(np.float32) for batch in micro_batches]

    class WatchedRunner(RoundRunner):
        def prepared_columns(self, *arguments: Any) -> Any:
            free.append(works_alone)
            return super().prepared_columns(*arguments)

    class MeasuredRank(TrainingRank):
        @contextmanager
        def rank0_only(self, work: str) -> Iterator[Any]:
            nonlocal works_alone
            with super().rank0_only(work) as progress:
                works_alone = True
                yield progress
                works_alone = False

        def run(self, function: Any, *arguments: Any, **named: Any) -> Any:
            if function is not assemble:
                return super().run(function, *arguments, **named)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            result = super().run(function, *arguments, **named)
            memory.append(tracemalloc.get_traced_memory()[1] - before)
            return result

    memory: list[int] = []
    free: list[bool] = []
    works_alone = False
    step_phases.BUNDLE_BYTES = job.bundle_bytes
    config = job.config
    learner: Any = Learner(config)
    board = Board(job.redis_url, RUN_ID, stages_for(config), config.board)
    trainer, intake = config.trainer, None
    if learner.world.rank == 0:
        intake = TrainingQueue(board, "trainer", config)
        while intake.held < trainer.groups_per_step:
            intake.take(1, 1.0)
    channel = RankChannel(COLLECTIVE_SECONDS, learner.world.disk)
    rank = MeasuredRank(
        channel=channel,
        learner=learner,
        checkpoint=CheckpointPart(learner),
        board=board,
        run_folder=job.folder,
        runner=WatchedRunner(learner, config),
        sharing=ModelParallelChannel(learner.world.dp_rank, COLLECTIVE_SECONDS),
        profiler=step_profiler(config, learner.world.rank, job.folder),
    )
    try:
        if intake is None:
            rank.follow()
        phases = step_phases.PreparedThenTrained(config, create(config.algorithm), rank)
        open_step = StepBuilder(1, phases.packer(), {})
        open_step.add(intake.select(1, ()).chosen)
        while (entry := open_step.packer.full_round() or open_step.packer.rest()) is not None:
            phases.take(open_step, entry, last=False)
        # It is never stopped: that may crash while a thread without the GIL allocates (CPython's issue 128679).
        tracemalloc.start()
        assert phases.close(open_step)
        rank.run(end)
    except Ended:
        pass
    finally:
        if intake is not None:
            intake.release_all()
            intake.close()
        board.close()
    leave_layout()
    checksums = {
        group_id: zlib.crc32(b"".join(group.columns[name].tobytes() for name in ("values", "returns", "advantages")))
        for group_id, group in rank.groups.items()
    }
    return {
        "checksums": checksums,
        "memory": memory,
        "free": free,
        "bytes": sum(group.nbytes for group in rank.groups.values()),
    }
