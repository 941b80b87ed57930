"""The normal form of MATH's answers (Hendrycks et al. 2021, arXiv 2103.03874): equal answers are equal texts."""

import re
from functools import lru_cache

from relaxd.rewards.mathematics.boxed import last_boxed

_WHOLE_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_MATHD_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{\s[^{}]*\}.*|\\(?:text|mathrm|mbox)\{[^{}]*\}$", re.DOTALL)
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°")
_DROPPED = re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\\?\$|\\?%|\\[,;:]|\n")
_NAME = re.compile(r"\A\s*\S{1,2}\s*=(?!=)")
_SHORT_SQRT = re.compile(r"\\sqrt\s*([^\s{\[\\])")
_MATHD_SHORT_FRAC = re.compile(r"\\frac(?:([0-9a-zA-Z])|\{([^{}]*)\})\s*(?:([0-9a-zA-Z])|\{([^{}]*)\})")
_SLASH = re.compile(r"(-?)([0-9]+)/(-?[0-9]+)")


def normalize(answer: str) -> str:
    """Return MATH's normal form of an answer in LaTeX.

    It drops what doesn't change the value: layout, degrees, dollars, percent, units at the end, "x =" before it, and
    blanks.
    "0.5" and "a/b" of whole numbers become \\frac{}{}. Numbers keep their digits: "0.50" and "0.5" differ.
    """
    answer = answer.strip()
    if whole := _WHOLE_TEXT.fullmatch(answer):
        answer = whole[1].strip()
    answer = _DEGREES.sub("", answer.replace("\\\\", "\\"))
    answer = _DROPPED.sub("", re.sub(r"\\[td]frac", r"\\frac", answer)).strip()
    answer = _MATHD_UNITS.sub("", answer) or answer
    if answer.count("=") == 1:
        answer = _NAME.sub("", answer, count=1)
    answer = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", answer)
    answer = _SHORT_SQRT.sub(r"\\sqrt{\1}", answer)
    answer = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", answer)  # "7 3/4" is not "73/4"
    answer = _MATHD_SHORT_FRAC.sub(_frac, answer)
    if slash := _SLASH.fullmatch(answer):
        answer = f"{slash[1]}\\frac{{{slash[2]}}}{{{slash[3]}}}"
    return r"\frac{1}{2}" if answer == "0.5" else answer


@lru_cache(1024)  # the samples of a group share it
def reference(answer: str, reward: str) -> str:
    """Return a reference answer: what is in its box if it has one.

    Raises ValueError when it is empty, because every reward would then be 0 (or, compared with nothing, 1).
    """
    boxed = last_boxed(answer)
    found = answer.strip() if boxed is None else boxed
    if not found:
        raise ValueError(f"answer is {answer!r}: the reward {reward} needs a reference answer")
    return found


def _frac(match: re.Match[str]) -> str:
    above, below = match[1] or match[2], match[3] or match[4]
    return f"\\frac{{{above or ''}}}{{{below or ''}}}"
