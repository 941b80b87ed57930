"""Reward for multiple-choice questions: compares the chosen letter."""

import re

from relaxd.media.messages import tagged, without_thinking
from relaxd.rewards.interface import RewardInput

_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_STATED = re.compile(
    r"(?i:\banswer\s*+(?:is\s*+:?+|:|=))[\s*_(\[{\"'\u2018\u201c$]*+(?:\\(?:boxed|text|mathrm)\{)*+\(?+"
    r"([A-Za-z])(?![^\W_]|['\u2019-]\w|[+#])(?=([^\n]{0,40}))"
)
"""Pattern of "answer is X" with the letter X, and of the text after it. Possessive quantifiers avoid backtracking."""
_NO_WORD = re.compile(
    r"[*_)\]}\"'\u2019\u201d$]|[.,;:!?](?!\w)|\s*+$|\s++(?:because|since|as|so|and|but|not|for|due)\b"
)
"""Pattern of text that may follow "a" or "I" only where they name a choice, not where they are words."""
_OR = re.compile(
    r"[*_)\]}\"'\u2019\u201d$]*+\s*+(?:(?:or\b|/|&)|and\b(?!\W++\w\s++\w))[\s*_(\[\"'\u2018\u201c$]*+(?:[A-Z]\b|[a-z]\))"
)
"""Pattern of text such as "or B", which names a second choice after the first letter."""
_SURE = frozenset("BCDEFGHJKLMNOPQRSTUVWXYZ")
"""Capital letters that can only name a choice; A and I are also words."""


def multiple_choice(sample: RewardInput) -> dict[str, float]:
    """1 if the reply's letter is the answer's, else 0.

    After the thinking, the reply's letter is in its last <answer>...</answer>; or else in the last "answer is X" or
    "Answer: X"; or else the whole reply is a letter such as "B", "(B)" or "B.". In a sentence, "A", "I" and small
    letters count only if marked as in "(b)", at the end of a line or sentence, or before a word such as "because": "The
    answer is a matter of ..." names no letter. A reply that names no letter, or two ("A or B"), is wrong. Parts:
    accuracy (equal to the reward), and format: 1 if a letter was found.

    Raises:
        ValueError: the answer isn't a letter.
    """
    expected = _LETTER.fullmatch(_untagged(sample.answer))
    if expected is None:
        raise ValueError(f"answer is {sample.answer!r}: the reward multiple_choice needs a letter")
    chosen = _chosen(without_thinking(sample.response))
    accuracy = float(chosen == expected.group(1).upper())
    return {"reward": accuracy, "accuracy": accuracy, "format": float(chosen is not None)}


def _untagged(text: str) -> str:
    found = tagged(text)
    return (found[-1] if found else text).strip()


def _chosen(response: str) -> str | None:
    whole = _LETTER.fullmatch(_untagged(response))
    if whole:
        return whole.group(1).upper()
    stated = [] if tagged(response) else [found.groups() for found in _STATED.finditer(response)]
    letters = [(letter, rest) for letter, rest in stated if letter in _SURE or _NO_WORD.match(rest) or _OR.match(rest)]
    if not letters or _OR.match(letters[-1][1]):
        return None
    return letters[-1][0].upper()
