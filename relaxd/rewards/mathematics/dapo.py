"""DAPO's reward: the last line "Answer: ...", as +1 or -1 (Yu et al. 2025, arXiv 2503.14476)."""

import re

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.mathematics.normal_forms import last_boxed, reference

_LAST = 300
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_LAST_BOXED = 100
"""Number of characters at a reply's end in which a box counts if the reply has no "Answer: ..."."""
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.0*)?")
_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip


def dapo(sample: RewardInput) -> dict[str, float]:
    """+1 if the last "Answer: ..." in the reply's last 300 letters is the answer, else -1.

    Both are converted to Minerva's normal form (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1) and compared as
    texts; whole numbers as numbers. Without such a line, a box in the last 100 characters must have exactly the text of
    the answer, or of the answer's box. This follows verl 0.9.1. Parts: accuracy: 1 or 0, and format: 1 if there is such
    a line or box.

    Raises:
        ValueError: the answer is empty, or only units.
    """
    answer = reference(sample.answer, "dapo")
    expected = _whole(minerva(answer))
    if not expected:
        raise ValueError(f"answer is {sample.answer!r}, of which nothing is left without units: dapo needs more")
    found = _ANSWER.findall(sample.response[-_LAST:])
    boxed = None if found else last_boxed(sample.response[-_LAST_BOXED:])
    right = _whole(minerva(found[-1])) == expected if found else boxed == answer
    return {"reward": 2 * float(right) - 1, "accuracy": float(right), "format": float(bool(found) or boxed is not None)}


def minerva(answer: str) -> str:
    """Return Minerva's normal form of an answer."""
    answer = answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    if answer.count("$") >= 2:
        answer = answer.split("$")[1]
    for command in ("text", "textbf", "overline", "boxed"):
        answer = _opened(answer, command)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    return answer.replace("$", "").strip().rstrip(".")


def _opened(answer: str, command: str) -> str:
    """Replace \\command{...} by the content of its braces, which may contain braces."""
    mark, place = f"\\{command}{{", 0
    while (start := answer.find(mark, place)) >= 0:
        place = start + len(mark)
        depth, end = 1, place
        while depth and end < len(answer):
            depth += (answer[end] == "{") - (answer[end] == "}")
            end += 1
        if not depth:
            answer, place = answer[:start] + answer[place : end - 1] + answer[end:], start
    return answer


def _whole(answer: str) -> str:
    """Return a whole number without thousands' commas and decimals, such as "1000" for "1,000.0"; other text
    unchanged."""
    return answer.replace(",", "").partition(".")[0] if _NUMBER.fullmatch(answer) else answer
