"""Packing as a stream: every sample once, within the budget, full micro-batches, the same work for all ranks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.batch.micro_batch_division import MAX_REPEAT, Packer, SequenceSize, pack_bins, spread_bins
from services.trainer.batch.step_plan import (
    MicroBatchRound,
    MicroBatchSlices,
    SequenceSlice,
    bubble_share,
    schedule_length,
)

Step = dict[str, tuple[int, list[int]]]
"""By group id: prompt tokens, and the response tokens of each sample."""

steps = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=8
).map(lambda groups: {f"g{number}": group for number, group in enumerate(groups)})


def packed(step: Step, budget: int, ranks: int, per_rank: int) -> list[MicroBatchRound]:
    """All rounds of a step whose groups come one by one."""
    packer = Packer(budget, ranks, per_rank)
    rounds = []
    for group_id, (prompt, responses) in step.items():
        packer.add(group_id, prompt, responses)
        while (entry := packer.full_round()) is not None:
            rounds.append(entry)
    if (entry := packer.rest()) is not None:
        rounds.append(entry)
    assert packer.rest() is None
    return rounds


def row_tokens(micro_batch: MicroBatchSlices, step: Step) -> int:
    """Tokens of the packed row."""
    return sum(
        step[piece.group_id][0] + sum(step[piece.group_id][1][i] for i in piece.sequences) for piece in micro_batch
    )


def micro_batches(rounds: list[MicroBatchRound]) -> list[MicroBatchSlices]:
    return [micro_batch for entry in rounds for share in entry.micro_batches for micro_batch in share]


def long_tailed(groups: int, samples: int, prompt: int) -> Step:
    """Answers of 3,000 tokens on average (log-normal), at most 16,384."""
    rng = random.Random(0)
    return {
        f"g{group:03d}": (
            prompt,
            [min(16_384, max(1, int(rng.lognormvariate(0, 1) * 1_820))) for _ in range(samples)],
        )
        for group in range(groups)
    }


@given(steps, st.integers(40, 100), st.integers(1, 3), st.integers(1, 2))
def test_every_sample_is_packed_once_within_the_budget(step: Step, budget: int, ranks: int, per_rank: int) -> None:
    rounds = packed(step, budget, ranks, per_rank)
    seen = []
    for entry in rounds:
        assert len(entry.micro_batches) == ranks
        assert len({len(share) for share in entry.micro_batches}) == 1
    for micro_batch in micro_batches(rounds):
        assert row_tokens(micro_batch, step) <= budget
        groups = [piece.group_id for piece in micro_batch]
        assert len(groups) == len(set(groups)), "samples of a group are apart: they don't share their prompt"
        seen += [(piece.group_id, index) for piece in micro_batch for index in piece.sequences]
    assert sorted(seen) == sorted((group_id, i) for group_id, (_, sizes) in step.items() for i in range(len(sizes)))
    assert rounds == packed(step, budget, ranks, per_rank)


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=20), st.integers(40, 60))
def test_only_sequences_that_share_the_prompt_count_on_it(sizes: list[tuple[int, bool]], budget: int) -> None:
    packer = Packer(budget, 1)
    packer.add("a", 15, [length for length, _ in sizes], [shares for _, shares in sizes])
    rest = packer.rest()
    assert rest is not None
    seen = []
    for micro_batch in micro_batches([rest]):
        (indices,) = [piece.sequences for piece in micro_batch]
        prompt = 15 if any(sizes[i][1] for i in indices) else 0
        assert prompt + sum(sizes[i][0] for i in indices) <= budget
        seen += indices
    assert sorted(seen) == list(range(len(sizes)))


@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 1), (8, 1), (2, 4)])
def test_micro_batches_of_a_long_tailed_step_are_97_percent_full(ranks: int, per_rank: int) -> None:
    step, budget = long_tailed(128, 16, prompt=300), 32_768
    *full, rest = packed(step, budget, ranks, per_rank)
    found = micro_batches(full)
    assert sum(row_tokens(micro_batch, step) for micro_batch in found) >= 0.97 * budget * len(found)
    assert len(micro_batches([rest])) <= 3 * ranks * per_rank, "the rest is what doesn't fill a round and LOOKAHEAD"


@pytest.mark.parametrize(("stages", "ranks"), [(2, 4), (8, 1)])
def test_pipelines_of_large_steps_hardly_idle(stages: int, ranks: int) -> None:
    step, budget = long_tailed(128, 16, prompt=300), 32_768
    found = packed(step, budget, ranks, schedule_length(stages))
    assert len(found) > 1, "training begins before the step is full"
    assert bubble_share(found, stages) < 0.08


def test_a_small_step_is_one_schedule() -> None:
    (entry,) = packed(long_tailed(4, 4, prompt=300), 16_384, 1, schedule_length(4))
    count = len(entry.micro_batches[0])
    assert bubble_share([entry], 4) == 3 / (count + 3)
    assert (bubble_share([entry], 1), bubble_share([], 4), schedule_length(1)) == (0.0, 0.0, 1)


def test_long_prompts_are_shared() -> None:
    step = {f"g{group}": (8_192, [800] * 8) for group in range(16)}
    found = micro_batches(packed(step, 16_384, 1, 1))
    alone = 16 * 8  # 8,192 + 800 tokens twice are more than the budget
    assert len(found) <= alone / 2
    for micro_batch in found:
        attended = sum(len(piece.sequences) * (8_192 + 800) for piece in micro_batch)
        assert attended <= MAX_REPEAT * 16_384


def test_ranks_have_about_the_same_work() -> None:
    step = long_tailed(16, 8, prompt=300)
    (entry,) = packed(step, 32_768, 4, 1)[-1:]
    loads = []
    for share in entry.micro_batches:
        samples = [
            SequenceSize(piece.group_id, i, step[piece.group_id][0], step[piece.group_id][1][i])
            for micro_batch in share
            for piece in micro_batch
            for i in piece.sequences
        ]
        loads.append(sum(sample.work for sample in samples))
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_a_round_starts_when_two_rounds_worth_of_tokens_is_there() -> None:
    packer = Packer(10, 2)
    packer.add("a", 1, [4, 4, 4])
    assert packer.full_round() is None
    packer.add("b", 1, [9, 9, 9])
    assert packer.full_round() == MicroBatchRound((((SequenceSlice("b", (0,)),),), ((SequenceSlice("b", (1,)),),)))
    assert packer.full_round() is None
    rest = packer.rest()
    assert rest is not None
    assert [len(share) for share in rest.micro_batches] == [2, 2], "three don't go around: one group is divided"


def test_bins_do_not_depend_on_the_order_of_arrival() -> None:
    samples = [SequenceSize(f"g{i % 5}", i, 3, 1 + i * 7 % 11) for i in range(40)]
    shuffled = random.Random(1).sample(samples, len(samples))
    assert [each.sequences for each in pack_bins(samples, 30)] == [each.sequences for each in pack_bins(shuffled, 30)]


def test_samples_that_cannot_be_spread_are_told() -> None:
    assert spread_bins([SequenceSize("a", 0, 1, 9), SequenceSize("b", 0, 1, 9)], 10, 1) is None
