"""The plan of a step: its groups, their order, and their division into micro-batches and data-parallel ranks.

A floating-point sum depends on the order of its terms. The plan records the whole division, so the step's
arithmetic can be replayed from the plan and the groups' columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OUTCOME = "skipped_updates"
"""The field of a plan that is known only after the step."""


class PlanError(ValueError):
    """A recorded plan is malformed."""


@dataclass(frozen=True)
class SequenceSlice:
    """Some sequences of one group, in one micro-batch."""

    group_id: str
    """The group."""
    sequences: tuple[int, ...]
    """Which of its sequences, in order. None is in two slices."""


MicroBatchSlices = tuple[SequenceSlice, ...]
"""Sequences packed into one micro-batch."""


@dataclass(frozen=True)
class MicroBatchRound:
    """Micro-batches that all ranks process together."""

    micro_batches: tuple[tuple[MicroBatchSlices, ...], ...]
    """By data-parallel rank. Every rank has the same number of them; some may be empty."""

    def to_json(self) -> list[Any]:
        """The round as lists: rank, micro-batch, [group id, [sequences]]."""
        return [
            [[[piece.group_id, list(piece.sequences)] for piece in micro_batch] for micro_batch in rank]
            for rank in self.micro_batches
        ]

    @classmethod
    def from_json(cls, value: list[Any]) -> "MicroBatchRound":
        """Restore the result of `to_json`."""
        return cls(
            tuple(
                tuple(
                    tuple(SequenceSlice(group, tuple(sequences)) for group, sequences in micro_batch)
                    for micro_batch in rank
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
