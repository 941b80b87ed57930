"""Plans as JSON."""

import json
from dataclasses import replace

import pytest

from relaxd.algorithms.advantage_terms import Whitening
from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, PlanError, SequenceSlice, StepPlan


def test_a_plan_survives_json() -> None:
    rounds = (MicroBatchRound((((SequenceSlice("a", (0, 2)), SequenceSlice("b", (1,))),), ((),))),)
    other = (MicroBatchRound((((SequenceSlice("c", (0,)),),), ((SequenceSlice("c", (1,)),),))),)
    plan = StepPlan(3, 2, 7, ("b", "c", "a"), (MiniBatch(rounds, 4, 30, 30.0), MiniBatch(other, 2, 9, 9.0)), 2)
    for outcome, whitening in ((None, None), ((), Whitening(1 / 3, 0.1 + 0.2)), ((0, 3), None)):
        plan = replace(plan, skipped_updates=outcome, whitening=whitening)
        assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    first, second = plan.mini_batches
    assert plan.updates == (first, second, first, second)
    assert (plan.groups_of(first), plan.groups_of(second)) == (["b", "a"], ["c"])


def test_a_plan_of_an_earlier_release_is_of_one_update() -> None:
    rounds = [[[[["a", [0, 1]]]]]]
    old = {"step": 1, "term": 1, "seed": 0, "groups": ["a"], "rounds": rounds, "samples": 2, "trained_tokens": 7}
    plan = StepPlan.from_json({**old, "normalizer": 7.0, "skipped_updates": []})
    assert plan.updates == (MiniBatch((MicroBatchRound.from_json(rounds[0]),), 2, 7, 7.0),)


@pytest.mark.parametrize("change", [{"step": None}, {"mini_batches": [1]}, {"groups": 3}, {"whitening": {"mean": 0.0}}])
def test_what_is_no_plan_is_refused(change: dict[str, object]) -> None:
    plan = StepPlan(1, 1, 0, ("a",), (MiniBatch((), 1, 1, 1.0),)).to_json()
    with pytest.raises(PlanError, match="malformed step plan"):
        StepPlan.from_json(plan | change)
    with pytest.raises(PlanError, match="term"):
        StepPlan.from_json({name: value for name, value in plan.items() if name != "term"})
