"""The trainer with an algorithm of a user's own: it trains with it, or says what is wrong and trains nothing."""

import contextlib
from pathlib import Path

import pytest

from relaxd.algorithms import GRPO, AlgorithmError, LossInputs, LossOutput
from relaxd.board import Board, stages_for
from services.trainer.learner.update import TooManySkippedUpdates
from tests.integration.trainer.service_kit import RUN_ID, Feeder, make_config, trainer_service
from tests.integration.trainer.training_worlds import RunJob, run_job


class NoGradient(GRPO):
    """A loss that only a tensor shows to be wrong."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Lose the gradient."""
        return LossOutput(super().loss(inputs).loss.detach())


MADE_UP = 10
"""Tokens of the group on which a class is tried before the run."""


class ManyLosses(GRPO):
    """A loss that only real groups show to be wrong."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Don't add up."""
        found = super().loss(inputs)
        return found if inputs.logprobs.numel() <= MADE_UP else LossOutput(inputs.logprobs)


class Infinite(GRPO):
    """A loss that isn't finite for real groups."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Be too large."""
        found = super().loss(inputs)
        return LossOutput(found.loss * (1.0 if inputs.logprobs.numel() <= MADE_UP else float("inf")))


def test_a_run_is_trained_with_the_example(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    own = {"name": "examples.own_algorithm:TOPR", "settings": {"limit": 0.9}}
    config = make_config(tiny_qwen3, run={"steps": 1}, algorithm=own)
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        (entry,) = feeder.board.ledger()
        assert entry.metrics["grad_norm"] > 0
        # The engine said -5.5 of each token of 250: about half of the ratios of the worse answers are above the limit.
        assert 0 < entry.metrics["clip_fraction"] < 1
        assert process.stop() == 0


def test_a_class_that_cannot_be_trained_with_is_named_and_trains_nothing(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    name = f"{__name__}:NoGradient"
    config = make_config(tiny_qwen3, run={"steps": 1}, algorithm={"name": name})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, _):
        feeder.feed(2, 0)
        said = f"algorithm.name = '{name}': loss() returned a loss without a gradient"
        coordinator.wait(lambda: said in coordinator.status.detail)
        assert feeder.board.ledger() == []
        feeder.board.counts().check()


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("ManyLosses", AlgorithmError, "loss() returned a loss float32 [24]: it must be a scalar tensor"),
        ("Infinite", TooManySkippedUpdates, "loss() returned NaN or infinity for inputs that are finite. Check their"),
    ],
)
def test_a_loss_that_is_wrong_for_real_groups_is_named_and_trains_nothing(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None, name: str, error: type[Exception], said: str
) -> None:
    algorithm = {"name": f"{__name__}:{name}"}
    config = make_config(tiny_qwen3, run={"steps": 1}, trainer={"max_skipped_updates": 0}, algorithm=algorithm)
    feeder = Feeder(redis_url, config)
    feeder.feed(2, 0)
    feeder.board.close()
    with pytest.raises(error) as caught:
        run_job(RunJob(config, redis_url, tmp_path))
    assert f"{__name__}:{name}: {said}" in str(caught.value)
    with contextlib.closing(Board(redis_url, RUN_ID, stages_for(config), config.board)) as board:
        assert board.last_step() == 0
