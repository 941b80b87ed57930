"""The plan of a step: its groups, their order, and their division into micro-batches and data-parallel ranks.

A floating-point sum depends on the order of its terms. The plan records the whole division, so the step's
arithmetic can be replayed from the plan and the groups' columns.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.trainer.batch.packing import assign_to_ranks

OUTCOME = "skipped_updates"
"""The field of a plan that is known only after the step."""


class PlanError(ValueError):
    """A recorded plan is malformed."""


@dataclass(frozen=True)
class SampleSlice:
    """Some samples of one group, in one micro-batch."""

    group_id: str
    """The group."""
    samples: tuple[int, ...]
    """Which of its samples, in order."""


MicroBatchSlices = tuple[SampleSlice, ...]
"""Samples packed into one micro-batch."""


@dataclass(frozen=True)
class MicroBatchRound:
    """Micro-batches that all ranks process together."""

    micro_batches: tuple[tuple[MicroBatchSlices, ...], ...]
    """By data-parallel rank. Every rank has the same number of them; some may be empty."""

    def to_json(self) -> list[Any]:
        """The round as lists: rank, micro-batch, [group id, [samples]]."""
        return [
            [[[piece.group_id, list(piece.samples)] for piece in micro_batch] for micro_batch in rank]
            for rank in self.micro_batches
        ]

    @classmethod
    def from_json(cls, value: list[Any]) -> "MicroBatchRound":
        """Restore the result of `to_json`."""
        return cls(
            tuple(
                tuple(
                    tuple(SampleSlice(group, tuple(samples)) for group, samples in micro_batch) for micro_batch in rank
                )
                for rank in value
            )
        )


@dataclass(frozen=True)
class StepPlan:
    """Everything besides the groups' columns that determines a step's arithmetic."""

    step: int
    """The step, counted from 1."""
    term: int
    """Term of the trainer that took it."""
    seed: int
    """Seed of torch's generators."""
    groups: tuple[str, ...]
    """The groups, in the order in which they were taken."""
    rounds: tuple[MicroBatchRound, ...]
    """The micro-batches, in order."""
    samples: int
    """Samples of all groups."""
    trained_tokens: int
    """Tokens of all groups whose mask is 1."""
    normalizer: float
    """Divisor of the summed loss."""
    skipped_updates: tuple[int, ...] | None = None
    """Indices of the step's updates that were skipped because their loss or gradient wasn't finite. None if unknown, as
    in a step file, which is written before the update."""

    def to_json(self) -> dict[str, Any]:
        """The plan as the ledger and the step file keep it."""
        outcome = {} if self.skipped_updates is None else {OUTCOME: list(self.skipped_updates)}
        return {
            "step": self.step,
            "term": self.term,
            "seed": self.seed,
            "groups": list(self.groups),
            "rounds": [entry.to_json() for entry in self.rounds],
            "samples": self.samples,
            "trained_tokens": self.trained_tokens,
            "normalizer": self.normalizer,
            **outcome,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StepPlan":
        """Restore the result of `to_json`.

        Raises:
            PlanError: a field is missing or of another kind.
        """
        try:
            return cls(
                step=int(value["step"]),
                term=int(value["term"]),
                seed=int(value["seed"]),
                groups=tuple(str(group) for group in value["groups"]),
                rounds=tuple(MicroBatchRound.from_json(entry) for entry in value["rounds"]),
                samples=int(value["samples"]),
                trained_tokens=int(value["trained_tokens"]),
                normalizer=float(value["normalizer"]),
                skipped_updates=tuple(int(update) for update in value[OUTCOME]) if OUTCOME in value else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"malformed step plan: {error!r}") from error


class Packer:
    """Packs samples into micro-batches of a token budget, as they arrive.

    A micro-batch is closed when the next sample doesn't fit. The rest at the end of a step is divided evenly among
    ranks.
    """

    def __init__(self, budget_tokens: int, dp_size: int, per_rank: int = 1) -> None:
        """Pack for `dp_size` ranks, each of which takes `per_rank` micro-batches a round (one per stage)."""
        self._budget = budget_tokens
        self._dp_size = dp_size
        self._per_rank = per_rank
        self._full: deque[list[_Sample]] = deque()
        self._open: list[_Sample] = []

    def add(self, group_id: str, tokens: Sequence[int]) -> None:
        """Add a group's samples; `tokens` are their lengths with the prompt, at most the budget."""
        for sample, count in enumerate(tokens):
            if self._open and sum(s.tokens for s in self._open) + count > self._budget:
                self._full.append(self._open)
                self._open = []
            self._open.append(_Sample(group_id, sample, count))

    def full_round(self) -> MicroBatchRound | None:
        """Return a round for all ranks if enough micro-batches are full."""
        if len(self._full) < self._dp_size * self._per_rank:
            return None
        return MicroBatchRound(
            tuple(
                tuple(_micro_batch(self._full.popleft()) for _ in range(self._per_rank)) for _ in range(self._dp_size)
            )
        )

    def rest(self) -> MicroBatchRound | None:
        """Return the remaining samples as one round, None without any."""
        samples = [sample for micro_batch in (*self._full, self._open) for sample in micro_batch]
        self._full, self._open = deque(), []
        if not samples:
            return None
        shares = assign_to_ranks([sample.tokens for sample in samples], self._budget, self._dp_size)
        return MicroBatchRound(
            tuple(tuple(_micro_batch([samples[i] for i in indices]) for indices in share) for share in shares)
        )


@dataclass(frozen=True)
class _Sample:
    group_id: str
    index: int
    tokens: int


def _micro_batch(samples: Sequence[_Sample]) -> MicroBatchSlices:
    """Group neighbouring samples of one group into slices."""
    pieces: list[tuple[str, list[int]]] = []
    for sample in samples:
        if not pieces or pieces[-1][0] != sample.group_id:
            pieces.append((sample.group_id, []))
        pieces[-1][1].append(sample.index)
    return tuple(SampleSlice(group_id, tuple(indices)) for group_id, indices in pieces)
