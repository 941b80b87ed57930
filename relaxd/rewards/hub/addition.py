"""Reward for sums: compares the last number in the reply."""

import re
from decimal import Decimal

from relaxd.rewards.interface import RewardInput

# A minus (ASCII or U+2212) is a sign unless it may be an operator, as in "5-3". Commas may separate thousands.
_NUMBER = re.compile(r"(?<![0-9])[-\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_ANSWER = re.compile(rf"(?:[0-9][0-9 +]*=\s*)?{_NUMBER.pattern}\s*[.!]?")


def addition(sample: RewardInput) -> dict[str, float]:
    """1 if the last number in the reply equals the answer, else 0.

    Parts: accuracy (equal to the reward), and format: 1 if the reply is only an answer, right or wrong: a number, alone
    or as the right side of the sum ("21 + 90 = 111"), optionally with punctuation.

    Raises:
        ValueError: the answer isn't a number.
    """
    expected = _NUMBER.fullmatch(sample.answer.strip())
    if expected is None:
        raise ValueError(f"answer is {sample.answer!r}: the reward addition needs a number")
    numbers = _NUMBER.findall(sample.response)
    accuracy = float(bool(numbers) and _value(numbers[-1]) == _value(expected.group()))
    answered = _ANSWER.fullmatch(sample.response.strip()) is not None
    return {"reward": accuracy, "accuracy": accuracy, "format": float(answered)}


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))
