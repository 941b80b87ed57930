"""GSM8K's reward: the number after "####"."""

import re
from decimal import Decimal, InvalidOperation

from relaxd.rewards.base import RewardInput

_LAST = 300
_MARKED = re.compile(r"####\s*+\$?+\s*+([-\u2212]?[0-9.,]*[0-9])")
_GOES_ON = re.compile(r"[ \t]*+[-\u2212+*/^\u00d7\u00f7][ \t]*+[0-9(]|[eE][-+]?[0-9]")
"""What makes a number the beginning of a longer formula, such as "1/2", whose value isn't that of "1"."""


def gsm8k(sample: RewardInput) -> dict[str, float]:
    """1 if the number after the reply's last "####" is the answer, else 0.

    Only the last 300 letters are searched. The answer is a number, or a solution that ends in "#### number". Thousands'
    commas and a dollar are ignored. A formula, such as "1/2", is no number. Parts: accuracy (the same), and format: 1
    if there is a number after "####".

    Raises:
        ValueError: the answer isn't a number.
    """
    expected = _value(_marked(sample.answer) or sample.answer)
    if expected is None:
        raise ValueError(f"answer is {sample.answer!r}: the reward gsm8k needs a number, or one after ####")
    found = _marked(sample.response[-_LAST:])
    accuracy = float(found is not None and _value(found) == expected)
    return {"reward": accuracy, "accuracy": accuracy, "format": float(found is not None)}


def _marked(text: str) -> str | None:
    """Return the number after the last "####" that has one, or None if that is the beginning of a formula."""
    matches = list(_MARKED.finditer(text)) if "####" in text else []
    if not matches or (matches[-1].end() < len(text) and _GOES_ON.match(text, matches[-1].end())):
        return None
    return matches[-1][1]


def _value(number: str) -> Decimal | None:
    try:
        value = Decimal(number.strip().removeprefix("$").replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
