"""A frozen model (a reference or a teacher), and the columns that it computes for tokens.

It runs in its own replica or in the trainer's ranks. In the trainer's ranks it gets the student's likeliest tokens from
the trained model; in a separate replica, from a column of the groups that the generating engine wrote.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray

from relaxd.algorithms.base import Needs
from relaxd.board import (
    CANDIDATES,
    REF_LOGPROBS,
    STUDENT_CANDIDATES,
    TEACHER_CANDIDATE_LOGPROBS,
    TEACHER_LOGPROBS,
)
from relaxd.roles import REFERENCE, TEACHER
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.learner.forward import Forward
from services.trainer.model.architecture import ModelError
from services.trainer.model.hf_weights import load_hf
from services.trainer.model.policy_model import StageModel

COLUMNS_OF = {REFERENCE: (REF_LOGPROBS,), TEACHER: (TEACHER_LOGPROBS, CANDIDATES, TEACHER_CANDIDATE_LOGPROBS)}
"""Names of the columns that a frozen model can compute, by its role."""


@dataclass(frozen=True)
class Student:
    """Trained model, from which a teacher in the same ranks gets candidates."""

    forward: Forward
    """Runs forward passes of the trained model."""
    model: Any
    """Trained model with its current weights."""


class FrozenModel:
    """One rank's part of a frozen model. All ranks make the same calls in the same order."""

    def __init__(
        self,
        role: str,
        forward: Forward,
        needs: Needs,
        columns: Collection[str],
        trained_vocabulary: int,
        name: str = "",
    ) -> None:
        """Load the frozen model from the model folder of `forward`.

        Args:
            role: the model's role.
            forward: the model's forward passes.
            needs: the algorithm's needs.
            columns: the wanted columns; the model ignores columns that its role can't compute.
            trained_vocabulary: number of tokens of the trained model.
            name: the model's name among the models of its role.

        Raises:
            ModelError: both models have fewer tokens in common than there are candidates.
        """
        self.role = role
        self.name = name
        self.forward = forward
        self.columns = tuple(name for name in COLUMNS_OF[role] if name in columns)
        """Names of the columns that the model computes."""
        self._candidates = needs.candidates if CANDIDATES in self.columns else None
        # Models pad their output layers differently: candidates must be tokens of both.
        self._ids_below = min(trained_vocabulary, forward.architecture.vocab_size)
        if self._candidates is not None and self._candidates.top_k > self._ids_below:
            raise ModelError(
                f"algorithm.distill_top_k is {self._candidates.top_k}, but the {role} and the trained model have only "
                f"{self._ids_below} tokens in common"
            )
        self.module: StageModel = forward.load().requires_grad_(False)
        """This rank's part of the model, as a torch module."""
        self.refreshed = False
        """True if the weights are a copy of the trained model's, from `refresh` or a checkpoint."""

    @torch.no_grad()
    def refresh(self, trained: StageModel) -> None:
        """Replace the weights by an exact copy of the trained model's, which has the same architecture."""
        for own, weight in zip(self.module.parameters(), trained.parameters(), strict=True):
            own.copy_(weight)
        self.refreshed = True

    def load(self, folder: Path) -> None:
        """Replace the weights by those in a Hugging Face folder of the same architecture.

        Raises:
            ModelError, ModelFileError: the folder's weights don't fit, or can't be read.
        """
        load_hf(self.module, folder, self.forward.architecture, self.forward.world)

    def compute(
        self, micro_batches: Sequence[PackedMicroBatch], student: Student | None = None
    ) -> list[dict[str, NDArray[Any]]]:
        """Compute the model's columns for the tokens with loss_mask 1.

        Args:
            micro_batches: the micro-batches. Without `student`, they need the column STUDENT_CANDIDATES, [T, m], if the
                student's likeliest tokens become candidates.
            student: the trained model, if it is in these ranks.

        Returns:
            The columns of each micro-batch, [T] or [T, k], on all ranks. Where loss_mask is 0, candidates are -1 and
            other values 0.
        """
        of_student = [batch.columns.get(STUDENT_CANDIDATES) for batch in micro_batches]
        micro_batches = [_bare(batch) for batch in micro_batches]
        found: list[dict[str, NDArray[Any]]] = [{} for _ in micro_batches]
        for name in (REF_LOGPROBS, TEACHER_LOGPROBS):
            if name in self.columns:
                for columns, logprobs in zip(found, self.forward.log_probs(self.module, micro_batches), strict=True):
                    columns[name] = logprobs
        if CANDIDATES in self.columns:
            for columns, candidates in zip(
                found, self._compute_candidates(micro_batches, student, of_student), strict=True
            ):
                columns |= candidates
        return found

    def _compute_candidates(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        student: Student | None,
        of_student: Sequence[NDArray[Any] | None],
    ) -> list[dict[str, NDArray[Any]]]:
        assert self._candidates is not None
        top_k, below = self._candidates.top_k, self._ids_below
        own: list[dict[str, NDArray[Any]]] = []
        if self._candidates.of != "student":
            own = self.forward.likeliest(self.module, micro_batches, top_k, ids_below=below)
        if self._candidates.of == "teacher":
            return own
        if student is not None:
            likeliest = student.forward.likeliest(student.model, micro_batches, top_k, ids_below=below)
            ids = [columns[CANDIDATES] for columns in likeliest]
        else:
            pairs = zip(micro_batches, of_student, strict=True)
            ids = [_known(given, batch.loss_mask, below) for batch, given in pairs]
        if own:
            ids = [_without(mine, theirs[CANDIDATES]) for mine, theirs in zip(ids, own, strict=True)]
        asked = [
            replace(batch, columns={**batch.columns, CANDIDATES: mine})
            for batch, mine in zip(micro_batches, ids, strict=True)
        ]
        logprobs = self.forward.candidate_log_probs(self.module, asked)
        found = [
            {CANDIDATES: mine, TEACHER_CANDIDATE_LOGPROBS: values} for mine, values in zip(ids, logprobs, strict=True)
        ]
        return [_side_by_side(one, other) for one, other in zip(own, found, strict=True)] if own else found


def _bare(batch: PackedMicroBatch) -> PackedMicroBatch:
    """Return a micro-batch without the column STUDENT_CANDIDATES, which no forward pass reads."""
    return replace(batch, columns={name: row for name, row in batch.columns.items() if name != STUDENT_CANDIDATES})


def _known(ids: NDArray[Any] | None, loss_mask: NDArray[np.uint8], below: int) -> NDArray[np.int32]:
    """Return the student's candidate ids, int32 [T, m]: -1 where loss_mask is 0, and for ids not below `below`, which
    one of the vocabularies lacks."""
    if ids is None:
        raise ValueError(f"a micro-batch has no column {STUDENT_CANDIDATES!r}, and the student isn't in these ranks")
    return np.where((ids < below) & (loss_mask[:, None] != 0), ids, -1).astype(np.int32)


def _without(ids: NDArray[np.int32], others: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return candidate ids [T, k], with -1 for ids that are also in the same token's row of `others`."""
    repeated = np.zeros(ids.shape, np.bool_)
    for place in range(others.shape[1]):  # not all pairs at once: they would take k times the memory
        repeated |= ids == others[:, place : place + 1]
    return np.where(repeated, np.int32(-1), ids)


def _side_by_side(one: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([one[name], other[name]], axis=1) for name in one}
