"""Groups are divided into mini-batches of about the same size, always the same ones, and packed whole."""

from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from relaxd.algorithms import create
from relaxd.config import TrainerConfig
from relaxd.config.algorithm import GRPOConfig
from services.trainer.batch.groups import TrainGroup
from services.trainer.batch.micro_batch_division import (
    Packer,
    bundles,
    dp_ranks_of_groups,
    mini_batch,
    pack_rounds,
    split,
)


def make_group(number: int, tokens: int, samples: int = 2) -> TrainGroup:
    """A group of two samples, whose tokens add up."""
    lengths = np.array([tokens // 2, tokens - tokens // 2][:samples], np.int32)
    columns = {
        "prompt_tokens": np.zeros(0, np.int32),
        "lengths": lengths,
        "shares_prompt": np.ones(len(lengths), np.uint8),
        "loss_mask": np.ones(int(lengths.sum()), np.uint8),
        "reward": np.zeros(samples),
    }
    return TrainGroup(f"g{number:03}", columns)


def sizes(parts: list[list[TrainGroup]]) -> list[int]:
    return [sum(int(group.lengths.sum()) for group in part) for part in parts]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("number", [8, 11, 64])
def test_mini_batches_are_even_in_groups_and_tokens(number: int, count: int) -> None:
    lengths = np.random.default_rng(number).lognormal(4, 1, number).astype(int) + 2
    groups = [make_group(i, int(length)) for i, length in enumerate(lengths)]
    parts = split(groups, count, (3, 7))
    assert sorted(group.group_id for part in parts for group in part) == [group.group_id for group in groups]
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    # Whatever one has more than another is at most the largest group.
    assert max(sizes(parts)) - min(sizes(parts)) <= lengths.max()
    for part in parts:
        assert [group.group_id for group in part] == sorted(group.group_id for group in part), "in the step's order"


def test_the_division_depends_on_the_seeds_only() -> None:
    groups = [make_group(i, 10) for i in range(12)]

    def ids(seed: tuple[int, int]) -> list[list[str]]:
        return [[group.group_id for group in part] for part in split(groups, 3, seed)]

    assert ids((1, 5)) == ids((1, 5))
    assert len({str(ids((run, step))) for run in range(4) for step in range(4)}) == 16


def test_a_group_of_the_longest_answers_is_in_any_mini_batch() -> None:
    groups = [make_group(i, 100 if i == 0 else 10) for i in range(8)]
    places = Counter(
        next(place for place, part in enumerate(split(groups, 4, (0, step))) if groups[0] in part)
        for step in range(100)
    )
    assert min(places[place] for place in range(4)) > 10


def test_every_sequence_is_packed_once_within_the_budget() -> None:
    groups = [make_group(i, 6 + i) for i in range(9)]
    rounds = pack_rounds(groups, Packer(24, 2, 1))
    pieces = [piece for entry in rounds for share in entry.micro_batches for one in share for piece in one]
    found = Counter((piece.group_id, index) for piece in pieces for index in piece.sequences)
    assert found == Counter((group.group_id, index) for group in groups for index in (0, 1))
    made = mini_batch(groups, rounds, create(GRPOConfig(loss_aggregation="token_mean")))
    tokens = sum(6 + i for i in range(9))
    assert (made.samples, made.trained_tokens, made.normalizer) == (18, tokens, float(tokens))
    assert made.group_ids == {group.group_id for group in groups}


def test_more_mini_batches_than_groups_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"trainer\.mini_batches is 9: it must be at most .*groups_per_step = 8"):
        TrainerConfig(groups_per_step=8, mini_batches=9)
    assert TrainerConfig(groups_per_step=8, mini_batches=8, epochs=3).updates_per_step == 24
    assert TrainerConfig().updates_per_step == 1


def test_bundles_have_all_groups_in_order_and_at_most_so_many_bytes() -> None:
    groups = [make_group(i, tokens) for i, tokens in enumerate((100, 100, 900, 100, 100, 100))]
    limit = 3 * groups[0].nbytes
    found = list(bundles(groups, limit))
    assert [[group.group_id for group in bundle] for bundle in found] == [
        ["g000", "g001"],
        ["g002"],  # larger than the limit
        ["g003", "g004", "g005"],
    ]
    assert sum(group.nbytes for group in found[2]) == limit
    assert list(bundles([], limit)) == []


def test_every_rank_that_trains_on_a_part_of_a_group_is_known() -> None:
    groups = [make_group(i, 40) for i in range(5)]
    rounds = pack_rounds(groups, Packer(24, 2))
    found = dp_ranks_of_groups([mini_batch(groups, rounds, create(GRPOConfig()))])
    for group in groups:
        ranks = {
            dp_rank
            for entry in rounds
            for dp_rank, micro_batches in enumerate(entry.micro_batches)
            if any(piece.group_id == group.group_id for micro_batch in micro_batches for piece in micro_batch)
        }
        assert found[group.group_id] == ranks
    assert max(map(len, found.values())) == 2, "a group may be divided"
    assert found.keys() == {group.group_id for group in groups}
