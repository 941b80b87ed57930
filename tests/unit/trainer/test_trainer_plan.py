"""Plans as JSON."""

import json
from dataclasses import replace

import pytest

from services.trainer.batch.step_plan import MicroBatchRound, PlanError, SequenceSlice, StepPlan


def test_a_plan_survives_json() -> None:
    rounds = (MicroBatchRound((((SequenceSlice("a", (0, 2)), SequenceSlice("b", (1,))),), ((),))),)
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
