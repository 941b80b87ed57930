"""Commands to the ranks of a frozen model: rank 0 sends one to the others, and all execute it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from services.trainer.batch.row_packing import PackedMicroBatch
from services.trainer.learner.compared.frozen_model import FrozenModel

Models = Mapping[str, FrozenModel]
"""The models of this rank, by name."""


@dataclass(frozen=True)
class ComputeColumns:
    """Compute a model's columns for micro-batches."""

    model: str
    """Name of the model."""
    micro_batches: Sequence[PackedMicroBatch]

    def execute(self, models: Models) -> list[dict[str, NDArray[Any]]]:
        """Return the columns of each micro-batch."""
        return models[self.model].compute(self.micro_batches)


@dataclass(frozen=True)
class TakeOver:
    """Take over the weights of a Hugging Face folder."""

    folder: Path

    def execute(self, models: Models) -> None:
        """Load them into the only model. Raises ModelError, ModelFileError."""
        (model,) = models.values()
        model.load(self.folder)
