"""A plan of a step."""

from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, SequenceSlice, StepPlan

ROUND = MicroBatchRound((((SequenceSlice("a", (0,)), SequenceSlice("b/c", (0, 1))),),))
PLAN = StepPlan(2, 1, 0, ("a", "b/c"), (MiniBatch((ROUND,), 3, 5, 5.0),))
