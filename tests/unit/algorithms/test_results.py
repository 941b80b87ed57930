"""What an algorithm's methods return for real groups is checked, and class and method are named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relaxd.algorithms import GRPO, PPO, AlgorithmError, LossInputs, LossOutput
from relaxd.algorithms.base import AdvantagesAndReturns, ValuedGroup
from relaxd.algorithms.results import advantages_of, filtered_by, loss_of, returns_of, token_weights_of
from relaxd.config.algorithm import GRPOConfig, PPOConfig
from tests.kit.cases import each
from tests.unit.algorithms.loss_inputs import make_inputs

REWARDS, LENGTHS, MASK = np.array([0.0, 1.0]), np.array([2, 1], np.int32), np.array([1, 0, 1], np.uint8)
ONES = np.ones(3, np.float32)
GROUP = ValuedGroup(ONES, ONES, MASK, LENGTHS)


def own(base: type[Any], config: Any, **methods: Any) -> Any:
    """An instance of a class with other methods, or with methods that return a value."""

    def method(value: Any) -> Any:
        return value if callable(value) else lambda self, *_: value

    return type("Mine", (base,), {name: method(value) for name, value in methods.items()})(config)


def raising(self: Any, *_: Any) -> Any:
    raise KeyError("absent")


@each(
    ("methods", "call", "said"),
    [
        (
            {"filtered": True},
            lambda mine: filtered_by(mine, REWARDS, LENGTHS, {}),
            "filtered() returned bool True: it must be Filtered or None",
        ),
        (
            {"advantages": raising},
            lambda mine: advantages_of(mine, REWARDS, LENGTHS, {}),
            "advantages() failed: KeyError: 'absent'",
        ),
        (
            {"advantages": ONES},
            lambda mine: advantages_of(mine, REWARDS, LENGTHS, {}),
            "advantages() returned float32 [3]: it must be Advantages or Filtered",
        ),
        (
            {"token_weights": ONES.astype(np.float64)},
            lambda mine: token_weights_of(mine, MASK, LENGTHS),
            "token_weights() returned float64 [3]: they must be float32 [3]",
        ),
        (
            {"token_weights": ONES * np.float32(np.nan)},
            lambda mine: token_weights_of(mine, MASK, LENGTHS),
            "token_weights() returned of which [0] is nan: they must be finite",
        ),
        (
            {"token_weights": ONES},
            lambda mine: token_weights_of(mine, MASK, LENGTHS),
            "token_weights() isn't 0 where the mask is 0",
        ),
        (
            {"advantages_and_returns": AdvantagesAndReturns(ONES[:2], ONES)},
            lambda mine: returns_of(mine, GROUP),
            "advantages_and_returns() returned advantages float32 [2]: they must be float32 [3]",
        ),
        (
            {"advantages_and_returns": AdvantagesAndReturns(ONES, ONES * np.float32(np.inf))},
            lambda mine: returns_of(mine, GROUP),
            "advantages_and_returns() returned returns of which [0] is inf: they must be finite",
        ),
        (
            {"loss": lambda self, inputs: inputs.logprobs.sum()},
            lambda mine: loss_of(mine, make_inputs()),
            "loss() returned float64 []: it must be LossOutput",
        ),
        (
            {"loss": lambda self, inputs: LossOutput(inputs.logprobs)},
            lambda mine: loss_of(mine, make_inputs()),
            "it must be a scalar tensor, the sum over tokens",
        ),
        (
            {"loss": lambda self, inputs: LossOutput(inputs.mask.sum())},
            lambda mine: loss_of(mine, make_inputs()),
            "loss() returned a loss without a gradient: it must depend on inputs.logprobs",
        ),
        (
            {"loss": lambda self, inputs: LossOutput(inputs.logprobs.sum(), {"kl": inputs.mask})},
            lambda mine: loss_of(mine, make_inputs()),
            "loss() returned sums['kl'] ",
        ),
    ],
)
def test_class_and_method_are_named(methods: dict[str, Any], call: Callable[[Any], Any], said: str) -> None:
    kind, config = (PPO, PPOConfig()) if "advantages_and_returns" in methods else (GRPO, GRPOConfig())
    with pytest.raises(AlgorithmError) as caught:
        call(own(kind, config, **methods))
    assert str(caught.value).startswith(f"{__name__}:Mine: {next(iter(methods))}()")
    assert said in str(caught.value)


def test_what_is_right_is_returned_as_it_is() -> None:
    algorithm = GRPO(GRPOConfig())
    found = advantages_of(algorithm, REWARDS, LENGTHS, {})
    np.testing.assert_array_equal(found.values, algorithm.advantages(REWARDS, LENGTHS).values)
    np.testing.assert_array_equal(token_weights_of(algorithm, MASK, LENGTHS), [1, 0, 1])
    inputs: LossInputs = make_inputs()
    torch.testing.assert_close(loss_of(algorithm, inputs).loss, algorithm.loss(inputs).loss)
    assert filtered_by(algorithm, np.zeros(2), LENGTHS, {}) is not None
    assert filtered_by(algorithm, REWARDS, LENGTHS, {}) is None


def test_returns_of_values_that_are_not_finite_are_not_the_algorithms_mistake() -> None:
    """The trainer skips such an update."""
    wrong = ValuedGroup(ONES, ONES * np.float32(np.nan), MASK, LENGTHS)
    assert np.isnan(returns_of(PPO(PPOConfig()), wrong).returns[0])
