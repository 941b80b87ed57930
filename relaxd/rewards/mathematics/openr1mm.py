"""Open-R1's reward for multimodal mathematics: math-verify, or the answer's exact text."""

import logging
import re

from relaxd.media.messages import tagged
from relaxd.rewards.interface import RewardInput, TooSlow, time_limit
from relaxd.rewards.mathematics.normal_forms import reference
from relaxd.rewards.mathematics.sentences import formula_of, has_marks, with_improper_fractions

VERIFY_SECONDS = 3.0
"""Maximum seconds for math-verify to read and compare two answers, which then count as different."""
MAX_LETTERS = 4000
"""Letters of the reply that math-verify reads, from the end."""
_MATH_VERIFY_LOG = logging.getLogger("math_verify")
_CURRENCY = r"\$"
"""Dollars that don't enclose a formula."""
_IN_DOLLARS = re.compile(r"\${1,2}[^$]+\${1,2}")
_TAGS = ("</think>", "<answer>", "</answer>")


def openr1mm(sample: RewardInput) -> dict[str, float]:
    """1 if math-verify finds the reply equal to the answer, or the text in <answer> is the answer's; else 0.

    A reply with more than one </think>, <answer> or </answer> gets 0. Parts: accuracy (the same), and format: 1 if
    there is exactly one of <answer> and </answer>. Needs the package math-verify.

    Raises:
        ValueError: the answer is empty.
    """
    expected = reference(_untagged(sample.answer), "openr1mm")
    found = tagged(sample.response)
    if any(sample.response.count(tag) > 1 for tag in _TAGS):
        return {"reward": 0.0, "accuracy": 0.0, "format": 0.0}
    same = bool(found) and found[0].strip() == expected
    accuracy = float(same or _is_verified(expected, found[0] if found else sample.response))
    return {"reward": accuracy, "accuracy": accuracy, "format": float(bool(found))}


def _untagged(answer: str) -> str:
    found = tagged(answer)
    return found[-1] if found else answer


def _is_verified(expected: str, response: str) -> bool:
    from math_verify import parse, verify

    _MATH_VERIFY_LOG.setLevel(logging.ERROR)  # it warns that its own limits are off, as they are meant to be
    expected = expected.replace(_CURRENCY, "")
    if len(_IN_DOLLARS.findall(expected)) > 1:
        expected = expected.replace("$", "")
    reference = _marked(expected)
    if reference is None:  # math-verify would read one number of several
        return False
    reply = response[-MAX_LETTERS:].replace(_CURRENCY, "")
    # Its own limits are off: its handler of SIGALRM would replace ours.
    try:
        with time_limit(VERIFY_SECONDS):
            gold = parse(reference, parsing_timeout=None)
            target = parse(_marked(reply) or reply, parsing_timeout=None)
            return bool(gold) and bool(target) and bool(verify(gold, target, timeout_seconds=None))
    except (TooSlow, RecursionError):
        return False


def _marked(text: str) -> str | None:
    """Return a text with its formulas in dollars or boxes; None for a sentence with none or several."""
    return with_improper_fractions(text) if has_marks(text) else formula_of(text)
