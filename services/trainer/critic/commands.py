"""Commands that the ranks of a critic execute together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relaxd.board import RETURNS
from relaxd.board.committed_steps import CommittedSteps
from services.trainer.batch.row_packing import PackedMicroBatch
from services.trainer.batch.step_file import read_committed
from services.trainer.critic.learner import COLUMNS, CriticLearner
from services.trainer.loop.commanded_rank import CommandedRank


@dataclass
class CriticRank(CommandedRank):
    """The state of a rank that trains the critic. Its `run_folder` is the critic's, in that of the run."""

    learner: CriticLearner
    """The critic."""
    steps_of: Path
    """The run's folder, with the step files."""
    progress: Callable[[], None] = lambda: None
    """Rank 0: called between two rounds of a step."""

    @cached_property
    def steps(self) -> CommittedSteps:
        """The committed steps of the run."""
        return CommittedSteps(self.board.ledger, self.steps_of)


@dataclass(frozen=True)
class Value:
    """Compute the values of micro-batches."""

    micro_batches: Sequence[PackedMicroBatch]

    def execute(self, rank: CriticRank) -> list[dict[str, NDArray[Any]]]:
        """Return their columns."""
        return rank.learner.values(self.micro_batches)


@dataclass(frozen=True)
class TrainStep:
    """Train on a committed step."""

    step: int
    plan: Mapping[str, Any]
    """The step's plan in the ledger."""

    def execute(self, rank: CriticRank) -> None:
        """Read the step's file, and train. Raises StepFileError."""
        with rank.channel.disk.all_ranks(f"reading the file of step {self.step}") as progress:
            file = read_committed(rank.steps_of, self.step, self.plan, progress, (*COLUMNS, RETURNS))
        rank.learner.train(file, rank.progress)
