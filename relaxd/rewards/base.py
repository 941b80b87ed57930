"""What a reward is: a pure function over one sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class RewardInput:
    """One sample, as a reward sees it."""

    prompt: str
    """The prompt as text."""
    response: str
    """The model's answer as text, without end tokens."""
    answer: str = ""
    """The reference answer; "" where the data has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the prompt's line in the data."""
    finish_reason: str = ""
    """Why the answer ended: "stop", "length" or "abort"; "" when not known."""


@dataclass(frozen=True)
class RewardOutput:
    """A reward's verdict, checked: every number is finite."""

    reward: float
    """What is trained on."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components, only reported."""


Reward = Callable[[RewardInput], float | Mapping[str, float]]
"""Rates a sample: a number, or {"reward": number, part: number, ...}. It may raise: the sample is then marked failed
and its group is not trained on."""


class BadRewardError(ValueError):
    """A reward returned something that isn't a reward."""


def check_output(value: object) -> RewardOutput:
    """Turn what a reward returned into a `RewardOutput`, without ever making a number up.

    Raises:
        BadRewardError: it is no number, not finite, or a mapping without "reward".
    """
    if not isinstance(value, Mapping):
        return RewardOutput(_number("the reward", value))
    if "reward" not in value:
        raise BadRewardError(f'the reward returned a mapping without "reward"; its keys are {sorted(map(repr, value))}')
    for name in value:
        if not isinstance(name, str):
            raise BadRewardError(f"the reward returned a part named {name!r}: names must be text")
    parts = {name: _number(f"part {name!r} of the reward", part) for name, part in value.items() if name != "reward"}
    return RewardOutput(_number("the reward", value["reward"]), parts)


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real):
        raise BadRewardError(f"{what} is {_shorten(repr(value))} ({type(value).__name__}): it must be a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise BadRewardError(f"{what} is too large for a float64") from error
    if not math.isfinite(number):
        raise BadRewardError(f"{what} is {number}: it must be finite")
    return number


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
