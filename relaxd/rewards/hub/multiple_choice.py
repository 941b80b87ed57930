"""Reward for multiple-choice questions: compares the chosen letter."""

import re

from relaxd.rewards.base import RewardInput
from relaxd.rewards.tags import tagged

_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_STATED = re.compile(r"\banswer\s*(?:is|:|=)\s*\**\(?([A-Z])\b", re.IGNORECASE)


def multiple_choice(sample: RewardInput) -> dict[str, float]:
    """1 if the reply's letter is the answer's, else 0.

    The reply's letter is that in its last <answer>...</answer>; else in the last "answer is X" or "Answer: X"; else the
    whole reply, if it is a letter such as "B", "(B)" or "B.". Case doesn't matter. A reply without a letter is wrong.
    Parts: accuracy (the same), and format: 1 if a letter was found.

    Raises:
        ValueError: the answer isn't a letter.
    """
    expected = _LETTER.fullmatch(_untagged(sample.answer))
    if expected is None:
        raise ValueError(f"answer is {sample.answer!r}: the reward multiple_choice needs a letter")
    chosen = _chosen(sample.response)
    accuracy = float(chosen == expected.group(1).upper())
    return {"reward": accuracy, "accuracy": accuracy, "format": float(chosen is not None)}


def _untagged(text: str) -> str:
    found = tagged(text)
    return (found[-1] if found else text).strip()


def _chosen(response: str) -> str | None:
    whole = _LETTER.fullmatch(_untagged(response))
    if whole:
        return whole.group(1).upper()
    stated = [] if tagged(response) else _STATED.findall(response)
    return stated[-1].upper() if stated else None
