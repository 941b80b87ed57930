"""Plans and packing as a stream: every sample once, within the budget, the same however groups arrive."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.batch.plan import MicroBatchRound, Packer, PlanError, SampleSlice, StepPlan

groups_of_lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=8)


def packed(groups: list[list[int]], budget: int, ranks: int, per_rank: int) -> list[MicroBatchRound]:
    """All rounds of a step whose groups come one by one."""
    packer = Packer(budget, ranks, per_rank)
    rounds = []
    for number, lengths in enumerate(groups):
        packer.add(f"g{number}", lengths)
        while (entry := packer.full_round()) is not None:
            rounds.append(entry)
    if (entry := packer.rest()) is not None:
        rounds.append(entry)
    assert packer.rest() is None
    return rounds


@given(groups_of_lengths, st.integers(40, 100), st.integers(1, 3), st.integers(1, 2))
def test_every_sample_is_packed_once_within_the_budget(
    groups: list[list[int]], budget: int, ranks: int, per_rank: int
) -> None:
    rounds = packed(groups, budget, ranks, per_rank)
    seen = []
    for entry in rounds:
        assert len(entry.micro_batches) == ranks
        assert len({len(share) for share in entry.micro_batches}) == 1
        for share in entry.micro_batches:
            for micro_batch in share:
                samples = [(piece.group_id, index) for piece in micro_batch for index in piece.samples]
                assert sum(groups[int(group_id[1:])][index] for group_id, index in samples) <= budget
                seen += samples
    assert sorted(seen) == sorted((f"g{g}", i) for g, lengths in enumerate(groups) for i in range(len(lengths)))
    assert rounds == packed(groups, budget, ranks, per_rank)


def test_a_round_starts_when_each_rank_has_a_full_micro_batch() -> None:
    packer = Packer(10, 2)
    packer.add("a", [5, 5, 5])
    assert packer.full_round() is None  # one is full, the other might still grow
    packer.add("b", [5, 5])
    assert packer.full_round() == MicroBatchRound(
        (((SampleSlice("a", (0, 1)),),), ((SampleSlice("a", (2,)), SampleSlice("b", (0,))),))
    )
    assert packer.rest() == MicroBatchRound((((SampleSlice("b", (1,)),),), ((),)))


def test_a_plan_survives_json() -> None:
    rounds = (MicroBatchRound((((SampleSlice("a", (0, 2)), SampleSlice("b", (1,))),), ((),))),)
    plan = StepPlan(3, 2, 7, ("a", "b"), rounds, 4, 30, 30.0)
    for outcome in (None, (), (0,)):
        plan = replace(plan, skipped_updates=outcome)
        assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("change", [{"step": None}, {"rounds": [1]}, {"groups": 3}])
def test_what_is_no_plan_is_refused(change: dict[str, object]) -> None:
    plan = StepPlan(1, 1, 0, ("a",), (), 1, 1, 1.0).to_json()
    with pytest.raises(PlanError, match="malformed step plan"):
        StepPlan.from_json(plan | change)
    with pytest.raises(PlanError, match="normalizer"):
        StepPlan.from_json({name: value for name, value in plan.items() if name != "normalizer"})
