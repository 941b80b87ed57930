"""Worlds of four processes that read groups from a real board, and whose learners only pretend to compute."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.board import Board, BoardUnavailable, ColumnError, LedgerTrimmed, stages_for
from relaxd.config import RunConfig
from services.trainer.megatron.rank_messages import command
from tests.integration.trainer.service_kit import RUN_ID
from tests.kit.waiting import wait_until

PIECE_BYTES = 100
"""Of a broadcast: groups of these tests have more."""


@dataclass(frozen=True)
class StepJob:
    """A step whose groups wait on the board, until its updates."""

    config: RunConfig
    redis_url: str
    folder: Path
    late: int = 0
    """Groups that come when the others have been handed out already."""


@dataclass(frozen=True)
class FaultJob(StepJob):
    """All faults that the rank which reads may have, one after the other."""


class Ended(Exception):
    """The last command was executed."""


@command
def end(rank: Any) -> None:
    """End `TrainingRank.follow`, which otherwise ends with its process."""
    raise Ended


@command
def read(rank: Any, fault: str, deliveries: Sequence[Any], seconds: float = 60.0) -> None:
    """Read groups while the board has a fault; it may be unavailable for `seconds`. Each rank notes what it gets."""
    rank.board.fault = fault
    rank.channel.timeout_seconds = 2 * seconds
    try:
        rank.load_missing({delivery.group_id for delivery in deliveries}, deliveries)
        outcome = sorted(rank.groups)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    rank.outcomes.append(outcome)
    rank.forget_step()


@command
def be_silent(rank: Any, given_up: Path) -> None:
    """The rank that reads is silent until the other has given up."""
    from services.trainer.megatron.channels import ModelParallelChannel

    dp_rank = rank.learner.world.dp_rank
    channel, mine = ModelParallelChannel(dp_rank, 1.0), Path(f"{given_up}-{dp_rank}")
    if channel.reads:
        wait_until(mine.exists, "the other rank gives up")
        return
    try:
        channel.share(lambda: "nothing")
    except RuntimeError:
        rank.outcomes.append("gave up")
        mine.touch()


class WatchedBoard(Board):
    """Notes the groups that are loaded, and has the fault that it is told to have."""

    loaded: list[str]
    fault = ""

    def load(self, deliveries: Any, columns: Any) -> Any:
        self.loaded += [delivery.group_id for delivery in deliveries]
        fault, self.fault = self.fault, self.fault if self.fault == "gone" else ""
        if fault in ("away", "gone"):
            raise BoardUnavailable("Redis is away")
        if fault == "damaged":
            raise ColumnError("stored bytes do not match")
        if fault == "trimmed":
            raise LedgerTrimmed(1, "not one argument, but two")
        found = super().load(deliveries, columns)
        if fault == "malformed":
            del found[0]["tokens"]
        return found


def run_job(job: StepJob, ranks: int = 4) -> dict[str, Any]:
    """Run one job on this rank."""
    from services.trainer.loop.commanded_rank import CheckpointPart
    from services.trainer.loop.round_runner import RoundRunner
    from services.trainer.loop.step_profiler import step_profiler
    from services.trainer.loop.training_commands import TrainingRank
    from services.trainer.megatron import channels
    from services.trainer.megatron.channels import RankChannel
    from services.trainer.rehearsal import ScriptedLearner
    from tests.kit.megatron_world import leave_layout

    class Learner(ScriptedLearner):
        def accumulate(self, micro_batches: Sequence[Any], *, last: bool = False) -> None:
            trained.extend(zlib.crc32(batch.tokens.tobytes()) for batch in micro_batches)

    channels.PIECE_BYTES = PIECE_BYTES
    trained: list[int] = []
    learner: Any = Learner(job.config)
    board = WatchedBoard(job.redis_url, RUN_ID, stages_for(job.config), job.config.board)
    board.loaded = []
    rank: Any = TrainingRank(
        channel=RankChannel(60.0, learner.world.disk),
        learner=learner,
        checkpoint=CheckpointPart(learner),
        board=board,
        run_folder=job.folder,
        runner=RoundRunner(learner, job.config),
        sharing=channels.ModelParallelChannel(learner.world.dp_rank, 60.0),
        profiler=step_profiler(job.config, learner.world.rank, job.folder),
    )
    rank.outcomes = []
    checksums: dict[str, int] = {}
    try:
        if learner.world.rank != 0:
            rank.follow()
        (have_faults if isinstance(job, FaultJob) else run_step)(rank, job)
        rank.run(end)
    except Ended:
        checksums = {group_id: checksum(group.columns) for group_id, group in rank.groups.items()}
    board.close()
    leave_layout()
    return {
        "dp_rank": learner.world.dp_rank,
        "reads": rank.sharing.reads,
        "loaded": board.loaded,
        "trained": trained,
        "outcomes": rank.outcomes,
        "checksums": checksums,
    }


def run_step(rank: Any, job: StepJob) -> None:
    """Rank 0: prepare columns of the groups, divide them, and train."""
    from relaxd.algorithms import create
    from services.trainer.loop import step_phases
    from services.trainer.loop.step_phases import StepBuilder
    from services.trainer.loop.training_commands import train_round
    from services.trainer.loop.training_queue import TrainingQueue

    intake = TrainingQueue(rank.board, "trainer", job.config)
    while intake.held < job.config.trainer.groups_per_step:
        intake.take(1, 1.0)
    phases = step_phases.phases_for(job.config, create(job.config.algorithm), rank)
    open_step = StepBuilder(1, phases.packer(), {})
    chosen = intake.select(1, ()).chosen
    for some in (chosen[job.late :], chosen[: job.late]):
        open_step.add(some)
        while (entry := open_step.packer.full_round() or open_step.packer.rest()) is not None:
            phases.take(open_step, entry, last=False)
        assert phases.close(open_step)
    for mini_batch in open_step.mini_batches:
        for entry in phases.rounds(mini_batch):
            rank.run(train_round, entry, ())
    intake.close()


def have_faults(rank: Any, job: StepJob) -> None:
    """Rank 0: read the same groups with every fault."""
    first, *rest = deliveries = rank.board.take("train", "trainer", count=16, block_seconds=5.0)
    assert rest
    for fault in ("", "away", "damaged", "malformed", "trimmed", ""):
        rank.run(read, fault, deliveries)
    rank.run(read, "gone", deliveries, seconds=0.0)
    rank.board.drop(first, reason="by_hand")
    rank.run(read, "", deliveries)
    rank.run(be_silent, job.folder / "given-up")


def checksum(columns: Mapping[str, Any]) -> int:
    """A checksum of a group's columns: names, types and values."""
    described = [
        (name, str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else (name, value)
        for name, value in sorted(columns.items())
    ]
    return zlib.crc32(repr(described).encode())
