"""GSM8K's reward: the number after "####"."""

import re
from decimal import Decimal, InvalidOperation

from relaxd.rewards.base import RewardInput

_LAST = 300
_MARKED = re.compile(r"####\s*\$?\s*(-?[0-9.,]*[0-9])")


def gsm8k(sample: RewardInput) -> dict[str, float]:
    """1 if the number after the reply's last "####" is the answer, else 0.

    Only the last 300 letters are searched. The answer is a number, or a solution that ends in "#### number". Thousands'
    commas and a dollar are ignored. Parts: accuracy (the same), and format: 1 if there is a number after "####".

    Raises:
        ValueError: the answer isn't a number.
    """
    marked = _MARKED.findall(sample.answer)
    expected = _value(marked[-1] if marked else sample.answer)
    if expected is None:
        raise ValueError(f"answer is {sample.answer!r}: the reward gsm8k needs a number, or one after ####")
    found = _MARKED.findall(sample.response[-_LAST:])
    accuracy = float(bool(found) and _value(found[-1]) == expected)
    return {"reward": accuracy, "accuracy": accuracy, "format": float(bool(found))}


def _value(number: str) -> Decimal | None:
    try:
        value = Decimal(number.strip().removeprefix("$").replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
