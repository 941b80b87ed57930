"""Division of a step's groups into mini-batches, and of mini-batches into micro-batches of a token budget."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from relaxd.algorithms import Algorithm
from services.trainer.batch.groups import TrainGroup
from services.trainer.batch.step_plan import MicroBatchRound, MicroBatchSlices, MiniBatch, SequenceSlice

LOOKAHEAD = 1
"""Number of extra micro-batches per rank that are packed before a round is taken. A round takes the fullest
micro-batches; without extra ones, its last micro-batches would be half empty."""
MAX_REPEAT = 2
"""Maximum number of tokens that attention processes per micro-batch, as a multiple of the token budget. Attention
repeats a shared prompt for each sequence, and needs memory for each token."""
ATTENTION_LENGTH = 32_768
"""Estimated number of earlier tokens at which a token's attention costs as much as its other layers. It is about 6
times the hidden size: 24 k to 49 k for hidden sizes of 4 k to 8 k."""


@dataclass(frozen=True)
class SequenceSize:
    """Size of a group's sequence, in tokens."""

    group_id: str
    index: int
    prompt: int
    """Number of tokens of the shared prompt, stored once per group in a micro-batch; 0 if it isn't shared."""
    response: int

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return self.prompt + self.response

    @property
    def work(self) -> float:
        """Estimated training cost of the response and the whole sequence's attention, in tokens without attention."""
        return self.response + self.tokens * self.tokens / (2 * ATTENTION_LENGTH)


@dataclass
class _Bin:
    """Micro-batch that the packer is filling."""

    sequences: list[SequenceSize] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    """Ids of the groups whose shared prompt is in the micro-batch."""
    tokens: int = 0
    """Number of tokens in the micro-batch's row; a shared prompt counts once."""
    attended: int = 0
    """Number of tokens that attention processes; a shared prompt counts for each sequence."""

    def cost(self, sequence: SequenceSize) -> int:
        """Return the number of tokens by which the micro-batch grows if the sequence is added."""
        return sequence.response if sequence.group_id in self.groups else sequence.tokens

    def fits(self, sequence: SequenceSize, budget: int) -> bool:
        """Return True if the sequence fits into the micro-batch. Any sequence fits into an empty one."""
        if not self.sequences:
            return True
        within = self.attended + sequence.tokens <= MAX_REPEAT * budget
        return within and self.tokens + self.cost(sequence) <= budget

    def add(self, sequence: SequenceSize) -> None:
        self.tokens += self.cost(sequence)
        self.attended += sequence.tokens
        if sequence.prompt:
            self.groups.add(sequence.group_id)
        self.sequences.append(sequence)

    @property
    def work(self) -> float:
        """Estimated training cost of the micro-batch, in tokens without attention; a shared prompt counts once."""
        return sum(sequence.work for sequence in self.sequences) + _prompt_tokens(self.sequences)


class Packer:
    """Packs sequences into rounds: for each data-parallel rank the same number of micro-batches.

    While groups arrive, a round is taken as soon as the waiting sequences fill its micro-batches and LOOKAHEAD more per
    rank. After the step's last group, the remaining sequences are divided so that all ranks have about the same work.
    """

    def __init__(self, budget_tokens: int, dp_size: int, per_rank: int = 1) -> None:
        """`per_rank`: number of micro-batches per round for each of the `dp_size` data-parallel ranks."""
        self._budget = budget_tokens
        self._dp_size = dp_size
        self._per_rank = per_rank
        self._sequences: list[SequenceSize] = []

    def add(
        self, group_id: str, prompt_tokens: int, lengths: Sequence[int], shares_prompt: Sequence[int] | None = None
    ) -> None:
        """Add a group's sequences. Each sequence with its prompt must fit into the budget.

        Args:
            group_id: the group.
            prompt_tokens: tokens of its prompt.
            lengths: tokens of each sequence, without the shared prompt.
            shares_prompt: for each sequence whether it shares the prompt; None: all do.
        """
        sharing = shares_prompt if shares_prompt is not None else [1] * len(lengths)
        self._sequences += [
            SequenceSize(group_id, i, prompt_tokens if shares else 0, length)
            for i, (length, shares) in enumerate(zip(lengths, sharing, strict=True))
        ]

    def full_round(self) -> MicroBatchRound | None:
        """Remove and return a round of the fullest micro-batches; None while there are too few sequences."""
        count = self._dp_size * self._per_rank
        if _row_tokens(self._sequences) < (count + LOOKAHEAD * self._dp_size) * self._budget:
            return None
        bins = pack_bins(self._sequences, self._budget)
        bins.sort(key=lambda each: -each.tokens)
        chosen = bins[:count]
        taken = {(sequence.group_id, sequence.index) for each in chosen for sequence in each.sequences}
        self._sequences = [s for s in self._sequences if (s.group_id, s.index) not in taken]
        return self._round(chosen, self._per_rank)

    def rest(self) -> MicroBatchRound | None:
        """Remove and return all remaining sequences as one round; None if there are none."""
        sequences, self._sequences = self._sequences, []
        if not sequences:
            return None
        bins = pack_bins(sequences, self._budget)
        per_rank = -(-len(bins) // self._dp_size)
        even = spread_bins(sequences, self._budget, per_rank * self._dp_size)
        return self._round(even if even is not None else bins, per_rank)

    def _round(self, bins: Sequence[_Bin], per_rank: int) -> MicroBatchRound:
        """Distribute micro-batches to ranks, the most work first, each to the rank with the least so far."""
        shares: list[list[_Bin]] = [[] for _ in range(self._dp_size)]
        loads = [0.0] * self._dp_size
        for each in sorted(bins, key=lambda each: -each.work):
            rank = min((r for r in range(self._dp_size) if len(shares[r]) < per_rank), key=lambda r: (loads[r], r))
            shares[rank].append(each)
            loads[rank] += each.work
        return MicroBatchRound(
            tuple(
                tuple(_slices(each.sequences) for each in share) + ((),) * (per_rank - len(share)) for share in shares
            )
        )


def pack_bins(sequences: Sequence[SequenceSize], budget: int) -> list[_Bin]:
    """Pack sequences into few micro-batches: best fit, longest first, a group's together where that saves room.

    The same sequences give the same micro-batches, in whatever order they came.
    """
    bins: list[_Bin] = []
    for sequence in _longest_first(sequences):
        fitting = [each for each in bins if each.fits(sequence, budget)]
        if not fitting:
            bins.append(_Bin())
            fitting = bins[-1:]
        best = min(fitting, key=lambda each: (each.cost(sequence), budget - each.tokens))
        best.add(sequence)
    return bins


def spread_bins(sequences: Sequence[SequenceSize], budget: int, count: int) -> list[_Bin] | None:
    """Pack sequences into exactly `count` micro-batches of similar work; None if they don't fit."""
    bins = [_Bin() for _ in range(count)]
    for sequence in _longest_first(sequences):
        fitting = [each for each in bins if each.fits(sequence, budget)]
        if not fitting:
            return None
        min(fitting, key=lambda each: (each.work, each.cost(sequence))).add(sequence)
    return bins


def _longest_first(sequences: Sequence[SequenceSize]) -> list[SequenceSize]:
    return sorted(sequences, key=lambda sequence: (-sequence.tokens, sequence.group_id, sequence.index))


def _row_tokens(sequences: Sequence[SequenceSize]) -> int:
    return sum(sequence.response for sequence in sequences) + _prompt_tokens(sequences)


def _prompt_tokens(sequences: Sequence[SequenceSize]) -> int:
    """Return the total number of shared prompt tokens, counting each group's prompt once."""
    return sum({sequence.group_id: sequence.prompt for sequence in sequences if sequence.prompt}.values())


def _slices(sequences: Sequence[SequenceSize]) -> MicroBatchSlices:
    """Return a micro-batch's sequences as one slice per group, so that a group's sequences are neighbours."""
    groups: dict[str, list[int]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.group_id, []).append(sequence.index)
    return tuple(SequenceSlice(group_id, tuple(sorted(indices))) for group_id, indices in groups.items())


def split(groups: Sequence[TrainGroup], count: int, seed: Sequence[int]) -> list[list[TrainGroup]]:
    """Divide groups into mini-batches of similar token counts, whose group counts differ by at most one.

    The division depends only on the groups' tokens, their order and the seed. Groups of about the same size go
    to different mini-batches, so that none has only long answers.

    Args:
        groups: a step's groups, in order.
        count: number of mini-batches, at most the number of groups.
        seed: seeds of the random choice among equals, and of the mini-batches' order.

    Returns:
        The mini-batches' groups, in order.
    """
    random = np.random.default_rng(list(seed))
    tokens = [sum(group.sequence_tokens) for group in groups]
    largest_first = sorted(random.permutation(len(groups)).tolist(), key=lambda index: -tokens[index])
    chosen: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for begin in range(0, len(groups), count):
        # One group for each mini-batch: the largest group for the mini-batch with the fewest tokens.
        lightest_first = sorted(range(count), key=lambda number: loads[number])
        for number, index in zip(lightest_first, largest_first[begin : begin + count], strict=False):
            chosen[number].append(index)
            loads[number] += tokens[index]
    return [[groups[index] for index in sorted(chosen[number])] for number in random.permutation(count).tolist()]


def add_group(packer: Packer, group: TrainGroup) -> None:
    """Add a group's sequences to a packer."""
    columns = group.columns
    packer.add(group.group_id, len(columns["prompt_tokens"]), group.lengths.tolist(), columns["shares_prompt"].tolist())


def pack_rounds(groups: Sequence[TrainGroup], packer: Packer) -> list[MicroBatchRound]:
    """Pack groups into rounds of micro-batches, as if they arrived one by one."""
    rounds = []
    for group in groups:
        add_group(packer, group)
        while (entry := packer.full_round()) is not None:
            rounds.append(entry)
    if (entry := packer.rest()) is not None:
        rounds.append(entry)
    return rounds


def bundles(groups: Sequence[TrainGroup], max_bytes: int) -> Iterator[list[TrainGroup]]:
    """Divide groups, in order, into bundles of at most `max_bytes`. A larger group gets a bundle to itself."""
    bundle: list[TrainGroup] = []
    size = 0
    for group in groups:
        if bundle and size + group.nbytes > max_bytes:
            yield bundle
            bundle, size = [], 0
        bundle.append(group)
        size += group.nbytes
    if bundle:
        yield bundle


def dp_ranks_of_groups(mini_batches: Collection[MiniBatch]) -> dict[str, frozenset[int]]:
    """Return the data-parallel ranks that train on each group of the mini-batches, by group id."""
    found: dict[str, set[int]] = {}
    for entry in (entry for one in mini_batches for entry in one.rounds):
        for dp_rank, micro_batches in enumerate(entry.micro_batches):
            for group_id in (piece.group_id for micro_batch in micro_batches for piece in micro_batch):
                found.setdefault(group_id, set()).add(dp_rank)
    return {group_id: frozenset(dp_ranks) for group_id, dp_ranks in found.items()}


def mini_batch(groups: Collection[TrainGroup], rounds: Sequence[MicroBatchRound], algorithm: Algorithm) -> MiniBatch:
    """Return a mini-batch of these groups, with its numbers of samples and trained tokens, and its normalizer."""
    samples = sum(group.samples for group in groups)
    trained_tokens = sum(group.trained_tokens for group in groups)
    return MiniBatch(tuple(rounds), samples, trained_tokens, algorithm.normalizer(trained_tokens, samples))
