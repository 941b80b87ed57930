"""How many updates in a row may be skipped, and what is said when there were too many."""

from dataclasses import replace
from typing import Any

import pytest

from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, SequenceSlice, StepPlan
from services.trainer.learner.update import SkippedUpdates, TooManySkippedUpdates


def test_so_many_in_a_row_are_allowed_and_no_more() -> None:
    skipped = SkippedUpdates(2)
    for step in (1, 2):
        skipped.check(step, ["a"])
        skipped.record(step, ["a"], skipped=True)
    with pytest.raises(TooManySkippedUpdates, match="3 updates in a row"):
        skipped.check(3, ["a"])
    # An update that is done ends the row.
    skipped.record(3, ["a"], skipped=False)
    for step in (4, 5):
        skipped.check(step, ["a"])
        skipped.record(step, ["a"], skipped=True)
    with pytest.raises(TooManySkippedUpdates, match="The weights are those of step 3; the groups of step 6 are"):
        skipped.check(6, ["a"])


def test_zero_fails_at_the_first() -> None:
    skipped = SkippedUpdates(0)
    skipped.record(1, ["a"], skipped=False)
    with pytest.raises(TooManySkippedUpdates, match=r"1 update in a row .*[.]max_skipped_updates = 0 \(step 2: b, c\)"):
        skipped.check(2, ["b", "c"])


def test_an_error_stays_readable() -> None:
    skipped = SkippedUpdates(8)
    groups = [f"0-{number:06d}" for number in range(128)]
    for step in range(1, 9):
        skipped.record(step, groups, skipped=True)
    with pytest.raises(TooManySkippedUpdates) as raised:
        skipped.check(9, groups)
    assert str(raised.value).count("and 120 more") == 9
    assert len(str(raised.value)) < 2000


def plan_of(step: int, outcome: list[int]) -> dict[str, Any]:
    """A committed step of two mini-batches and two epochs."""
    parts = tuple(MiniBatch((MicroBatchRound((((SequenceSlice(group, (0,)),),),)),), 1, 1, 1.0) for group in "ab")
    return replace(StepPlan(step, 1, 0, ("a", "b"), parts, 2), skipped_updates=tuple(outcome)).to_json()


def test_updates_of_a_step_count_one_by_one() -> None:
    skipped = SkippedUpdates(2)
    skipped.record_step(1, plan_of(1, []))
    skipped.record_step(2, plan_of(2, [1, 3]))  # the last of them begins a row
    skipped.check(3, ["c"])
    skipped.record(3, ["c"], skipped=True)
    with pytest.raises(TooManySkippedUpdates) as raised:
        skipped.check(3, ["d", "c"])
    assert "3 updates in a row" in str(raised.value)
    assert "(step 2: b; step 3: c, d)" in str(raised.value)
    # The step in which one was applied was committed; the open one never is.
    assert "The weights are those of step 2; the groups of step 3 are" in str(raised.value)
    skipped.record(3, ["d"], skipped=False)
    for _ in range(2):
        skipped.record(3, ["c"], skipped=True)
    with pytest.raises(TooManySkippedUpdates, match="The weights are those of step 2;"):
        skipped.check(3, ["c"])
