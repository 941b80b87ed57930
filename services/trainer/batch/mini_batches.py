"""Division of a step's groups into mini-batches, and of mini-batches into micro-batches."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from relaxd.algorithms import Algorithm
from services.trainer.batch.groups import TrainGroup
from services.trainer.batch.round_packer import Packer
from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch


def split(groups: Sequence[TrainGroup], count: int, seed: Sequence[int]) -> list[list[TrainGroup]]:
    """Divide groups into mini-batches with about as many tokens, and as many groups except one.

    The division depends on nothing but the groups' tokens, their order and the seed. Groups of about the same size go
    to different mini-batches, so that none has only long answers.

    Args:
        groups: a step's groups, in order.
        count: number of mini-batches, at most that of groups.
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
        # One group for each, the largest for that which has the fewest tokens.
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
    """Pack groups into rounds of micro-batches, as if they came one by one."""
    rounds = []
    for group in groups:
        add_group(packer, group)
        while (entry := packer.full_round()) is not None:
            rounds.append(entry)
    if (entry := packer.rest()) is not None:
        rounds.append(entry)
    return rounds


def bundles(groups: Sequence[TrainGroup], max_bytes: int) -> Iterator[list[TrainGroup]]:
    """Divide groups, in order, into bundles of at most `max_bytes`, or of one group that is larger."""
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
    """Return the data-parallel ranks that train on each group of some mini-batches."""
    found: dict[str, set[int]] = {}
    for entry in (entry for one in mini_batches for entry in one.rounds):
        for dp_rank, micro_batches in enumerate(entry.micro_batches):
            for group_id in (piece.group_id for micro_batch in micro_batches for piece in micro_batch):
                found.setdefault(group_id, set()).add(dp_rank)
    return {group_id: frozenset(dp_ranks) for group_id, dp_ranks in found.items()}


def mini_batch(groups: Collection[TrainGroup], rounds: Sequence[MicroBatchRound], algorithm: Algorithm) -> MiniBatch:
    """Return the mini-batch of some groups that are packed into rounds."""
    samples = sum(group.samples for group in groups)
    trained_tokens = sum(group.trained_tokens for group in groups)
    return MiniBatch(tuple(rounds), samples, trained_tokens, algorithm.normalizer(trained_tokens, samples))
