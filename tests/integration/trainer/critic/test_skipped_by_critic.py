"""Updates that a critic service skips are counted in a row, whatever restarts it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, SequenceSlice, StepFile, StepPlan
from services.trainer.critic_rank import CriticLearner
from services.trainer.learner.update import TooManySkippedUpdates
from tests.integration.trainer.critic.critic_kit import config_of
from tests.kit.megatron_world import shut_down

GROUPS = ("a", "b")
TOKENS = 6
"""Of the answer of each group."""


def step_file(step: int, *, bad: tuple[str, ...] = ()) -> StepFile:
    """A step of two mini-batches with one group each; the returns of the `bad` ones can't be fitted."""
    random = np.random.default_rng(step)

    def columns(name: str) -> dict[str, Any]:
        returns = np.full(TOKENS, np.nan) if name in bad else random.normal(size=TOKENS)
        return {
            "prompt_tokens": np.arange(3, 8, dtype=np.int32),
            "tokens": random.integers(3, 250, TOKENS).astype(np.int32),
            "lengths": np.array([TOKENS], np.int32),
            "sample_of_sequence": np.zeros(1, np.int32),
            "shares_prompt": np.ones(1, np.uint8),
            "loss_mask": np.ones(TOKENS, np.uint8),
            "reward": np.ones(1, np.float64),
            "values": np.zeros(TOKENS, np.float32),
            "returns": returns.astype(np.float32),
        }

    parts = tuple(
        MiniBatch((MicroBatchRound((((SequenceSlice(name, (0,)),),),)),), 1, TOKENS, float(TOKENS)) for name in GROUPS
    )
    return StepFile(StepPlan(step, 1, 0, GROUPS, parts), {name: columns(name) for name in GROUPS})


def test_a_critic_that_restarts_fails_again_where_too_many_updates_were_skipped(
    tiny_qwen3: Path, tmp_path: Path, alone: None
) -> None:
    config = config_of(tiny_qwen3, {"placement": "service", "threads": 1}, max_skipped_updates=3, epochs=1)
    critic = CriticLearner(config)
    critic.train(step_file(1, bad=("b",)))
    assert critic.metrics["value_skipped_updates"] == 1
    critic.train(step_file(2, bad=GROUPS))
    snapshot = critic.snapshot(tmp_path)
    snapshot.write()
    said = "4 updates of the critic in a row had a loss or a gradient that isn't finite.*the last one is of step 3"
    with pytest.raises(TooManySkippedUpdates, match=said):
        critic.train(step_file(3, bad=("a",)))

    shut_down()
    again = CriticLearner(config)
    again.restore(tmp_path, 2, same_layout=True)
    with pytest.raises(TooManySkippedUpdates, match=said):
        again.train(step_file(3, bad=("a",)))

    again.restore(tmp_path, 2, same_layout=True)
    again.train(step_file(3, bad=("b",)))  # an update that isn't skipped ends the row
    again.train(step_file(4, bad=GROUPS))
    assert again.step == 4
