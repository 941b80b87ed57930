"""The interface of rewards: pure functions over one sample."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class RewardInput:
    """The sample that a reward gets."""

    prompt: str
    """The prompt as text."""
    response: str
    """The model's answer as text, without end tokens."""
    answer: str = ""
    """The reference answer; "" if the data has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the prompt's line in the data."""
    finish_reason: str = ""
    """End of the answer: "stop", "length" or "abort"; "" if unknown."""


@dataclass(frozen=True)
class RewardOutput:
    """A checked result of a reward, with finite numbers."""

    reward: float
    """The reward to train on."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components, for reporting only."""


Score = float | Mapping[str, float | Mapping[str, float]]
"""A number, or {"reward": number, "parts": {name: number}}; other keys beside "reward" are parts, too."""
Reward = Callable[[RewardInput], Score | Awaitable[Score]]
"""Scores a sample. It may be async. If it raises, the sample is failed and its group is not trained on."""


RIGHT = 'a number, or {"reward": number, "parts": {name: number}}'


class BadRewardError(ValueError):
    """A reward has the wrong signature or returned an invalid value."""


def check_output(value: object) -> RewardOutput:
    """Convert a reward's return value to a `RewardOutput`.

    Raises:
        BadRewardError: it is not a number, not finite, or a mapping without "reward"; the message says what is right.
    """
    if not isinstance(value, Mapping):
        return RewardOutput(_number("the reward", value))
    if "reward" not in value:
        raise BadRewardError(
            f'the reward returned a mapping without "reward"; its keys are {sorted(map(repr, value))}: return {RIGHT}'
        )
    parts = {name: part for name, part in value.items() if name not in ("reward", "parts")}
    nested = value.get("parts", {})
    parts |= nested if isinstance(nested, Mapping) else {"parts": nested}
    for name in parts:
        if not isinstance(name, str):
            raise BadRewardError(f"the reward returned a part named {name!r}: names must be text")
    numbers = {name: _number(f"part {name!r} of the reward", part) for name, part in parts.items()}
    return RewardOutput(_number("the reward", value["reward"]), numbers)


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real):
        shown = f"{_shorten(repr(value))} ({type(value).__name__})"
        raise BadRewardError(f"{what} is {shown}: it must be a number; return {RIGHT}")
    try:
        number = float(value)
    except OverflowError as error:
        raise BadRewardError(f"{what} is too large for a float64") from error
    if not math.isfinite(number):
        raise BadRewardError(f"{what} is {number}: it must be finite")
    return number


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
