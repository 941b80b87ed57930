"""Packing a step's samples into micro-batches of a token budget, as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.trainer.batch.plan import MicroBatchRound, MicroBatchSlices, SampleSlice

LOOKAHEAD = 2
"""Rounds' worth of tokens that are packed together, of which the fullest micro-batches become the next round: with one
round alone the last micro-batches would stay half empty."""
MAX_REPEAT = 2
"""Tokens that attention sees, over those of the budget. It repeats a prompt for each sample that shares it, and its
memory grows with that."""
ATTENTION_LENGTH = 32_768
"""Tokens before a token at which attending to them costs as much as everything else that is computed for it. It is 12
times the hidden size, halved: 24 k to 49 k for 4 k to 8 k channels."""


@dataclass(frozen=True)
class Sample:
    """One sample of a group, as large as it is."""

    group_id: str
    index: int
    prompt: int
    """Tokens of the prompt, which neighbours in a micro-batch share."""
    response: int

    @property
    def tokens(self) -> int:
        """Tokens with the prompt."""
        return self.prompt + self.response

    @property
    def work(self) -> float:
        """Cost in tokens without attention."""
        return self.response + self.tokens * self.tokens / (2 * ATTENTION_LENGTH)


@dataclass
class _Bin:
    """A micro-batch that is being filled."""

    samples: list[Sample] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    tokens: int = 0
    """Of the row: a shared prompt counts once."""
    attended: int = 0
    """A shared prompt counts for each sample."""

    def cost(self, sample: Sample) -> int:
        """Tokens that the row grows by when the sample is added."""
        return sample.response if sample.group_id in self.groups else sample.tokens

    def fits(self, sample: Sample, budget: int) -> bool:
        """Return whether the sample fits. Any sample fits into an empty micro-batch."""
        if not self.samples:
            return True
        within = self.attended + sample.tokens <= MAX_REPEAT * budget
        return within and self.tokens + self.cost(sample) <= budget

    def add(self, sample: Sample) -> None:
        self.tokens += self.cost(sample)
        self.attended += sample.tokens
        self.groups.add(sample.group_id)
        self.samples.append(sample)

    @property
    def work(self) -> float:
        """Cost of the samples, with each shared prompt once."""
        prompts = {sample.group_id: sample.prompt for sample in self.samples}
        return sum(sample.work for sample in self.samples) + sum(prompts.values())


class Packer:
    """Packs samples into rounds: for each data-parallel rank the same number of micro-batches.

    While groups arrive, a round is taken as soon as LOOKAHEAD rounds' worth of tokens is there. What is left when the
    step's last group is in is divided so that all ranks have about the same work.
    """

    def __init__(self, budget_tokens: int, dp_size: int, per_rank: int = 1) -> None:
        """Pack for `dp_size` ranks, each of which takes `per_rank` micro-batches a round (one per stage)."""
        self._budget = budget_tokens
        self._dp_size = dp_size
        self._per_rank = per_rank
        self._samples: list[Sample] = []

    def add(self, group_id: str, prompt_tokens: int, response_tokens: Sequence[int]) -> None:
        """Add a group's samples, none of which is above the budget with its prompt."""
        self._samples += [Sample(group_id, i, prompt_tokens, count) for i, count in enumerate(response_tokens)]

    def full_round(self) -> MicroBatchRound | None:
        """Return a round of the fullest micro-batches, if enough samples are there."""
        count = self._dp_size * self._per_rank
        if _row_tokens(self._samples) < LOOKAHEAD * count * self._budget:
            return None
        bins = pack_bins(self._samples, self._budget)
        bins.sort(key=lambda each: -each.tokens)
        chosen = bins[:count]
        taken = {(sample.group_id, sample.index) for each in chosen for sample in each.samples}
        self._samples = [s for s in self._samples if (s.group_id, s.index) not in taken]
        return self._round(chosen, self._per_rank)

    def rest(self) -> MicroBatchRound | None:
        """Return what is left, as one round; None if nothing is."""
        samples, self._samples = self._samples, []
        if not samples:
            return None
        bins = pack_bins(samples, self._budget)
        per_rank = -(-len(bins) // self._dp_size)
        even = spread_bins(samples, self._budget, per_rank * self._dp_size)
        return self._round(even if even is not None else bins, per_rank)

    def _round(self, bins: Sequence[_Bin], per_rank: int) -> MicroBatchRound:
        """Deal micro-batches out to ranks, the most work first, each to the rank that has the least so far."""
        shares: list[list[_Bin]] = [[] for _ in range(self._dp_size)]
        loads = [0.0] * self._dp_size
        for each in sorted(bins, key=lambda each: -each.work):
            rank = min((r for r in range(self._dp_size) if len(shares[r]) < per_rank), key=lambda r: (loads[r], r))
            shares[rank].append(each)
            loads[rank] += each.work
        return MicroBatchRound(
            tuple(tuple(_slices(each.samples) for each in share) + ((),) * (per_rank - len(share)) for share in shares)
        )


def pack_bins(samples: Sequence[Sample], budget: int) -> list[_Bin]:
    """Pack samples into few micro-batches: best fit, longest first; a group's samples together where that saves room.

    The same samples give the same micro-batches, in whatever order they came.
    """
    bins: list[_Bin] = []
    for sample in _longest_first(samples):
        fitting = [each for each in bins if each.fits(sample, budget)]
        if not fitting:
            bins.append(_Bin())
            fitting = bins[-1:]
        best = min(fitting, key=lambda each: (each.cost(sample), budget - each.tokens))
        best.add(sample)
    return bins


def spread_bins(samples: Sequence[Sample], budget: int, count: int) -> list[_Bin] | None:
    """Pack samples into exactly `count` micro-batches of about the same work; None if they don't fit like that."""
    bins = [_Bin() for _ in range(count)]
    for sample in _longest_first(samples):
        fitting = [each for each in bins if each.fits(sample, budget)]
        if not fitting:
            return None
        min(fitting, key=lambda each: (each.work, each.cost(sample))).add(sample)
    return bins


def _longest_first(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (-sample.tokens, sample.group_id, sample.index))


def _row_tokens(samples: Sequence[Sample]) -> int:
    prompts = {sample.group_id: sample.prompt for sample in samples}
    return sum(sample.response for sample in samples) + sum(prompts.values())


def _slices(samples: Sequence[Sample]) -> MicroBatchSlices:
    """Return samples as slices, one per group, so that neighbours share their prompt."""
    groups: dict[str, list[int]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample.index)
    return tuple(SampleSlice(group_id, tuple(sorted(indices))) for group_id, indices in groups.items())
