"""The trainer with an algorithm of a user's own: it trains with it, or says what is wrong and trains nothing."""

from pathlib import Path

from relaxd.algorithms import GRPO, LossInputs, LossOutput
from tests.integration.trainer.service_kit import make_config, trainer_service


class NoGradient(GRPO):
    """A loss that only a tensor shows to be wrong."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Lose the gradient."""
        return LossOutput(super().loss(inputs).loss.detach())


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
