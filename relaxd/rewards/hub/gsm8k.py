"""GSM8K's reward: the number after "####"."""

import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from relaxd.rewards.interface import RewardInput

_LAST = 300
_MARKED = re.compile(r"####\s*+\$?+\s*+([-\u2212]?[0-9.,]*[0-9])")
_GOES_ON = re.compile(r"[ \t]*+[-\u2212+*/^\u00d7\u00f7][ \t]*+[0-9(]|[eE][-+]?[0-9]")
"""Pattern of text after a number that continues a formula, such as "/2" in "1/2"."""


def gsm8k(sample: RewardInput) -> dict[str, float]:
    """1 if the number after the reply's last "####" is the answer, else 0.

    Only the reply's last 300 characters are searched. The answer is a number, or a solution that ends in "#### number".
    Thousands' commas and a dollar are ignored. A formula, such as "1/2", is no number. Parts: accuracy (equal to the
    reward), and format: 1 if there is a number after "####".

    Raises:
        ValueError: the answer isn't a number.
    """
    text, value = _expected(sample.answer)
    found = _marked(sample.response[-_LAST:])
    if found is None:
        return {"reward": 0.0, "accuracy": 0.0, "format": 0.0}
    accuracy = 1.0 if found.replace(",", "") == text or _value(found) == value else 0.0
    return {"reward": accuracy, "accuracy": accuracy, "format": 1.0}


@lru_cache(1024)  # the samples of a group share it
def _expected(answer: str) -> tuple[str, Decimal]:
    """Return the number in a reference answer, as text and as a Decimal. Raises ValueError if there is none."""
    number = _marked(answer) or answer
    value = _value(number)
    if value is None:
        raise ValueError(f"answer is {answer!r}: the reward gsm8k needs a number, or one after ####")
    return _plain(number), value


def _marked(text: str) -> str | None:
    """Return the number after the last "####" that a number follows; None if the number begins a formula."""
    end = len(text)
    while (place := text.rfind("####", 0, end)) >= 0:
        if match := _MARKED.match(text, place):
            behind = match.end()
            return None if behind < len(text) and _GOES_ON.match(text, behind) else match[1]
        end = place + 3
    return None


def _plain(number: str) -> str:
    return number.strip().removeprefix("$").replace(",", "").replace("\u2212", "-")


def _value(number: str) -> Decimal | None:
    try:
        value = Decimal(_plain(number))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
