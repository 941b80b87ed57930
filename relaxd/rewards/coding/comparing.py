"""Compare a program's output, or a function's value, with the right one."""

import math
import re
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WHOLE = re.compile(r"[-+]?[0-9]+")
RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Tolerances of numbers, those of numpy.allclose."""


def same_output(printed: str, expected: str) -> bool:
    """Return whether a program printed what is expected.

    Empty lines and white space at the ends of lines don't count. Lines are the same, or have the same words, where a
    number that is expected with a decimal point or an exponent need only be close.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(returned: Any, expected: Any) -> bool:
    """Return whether a function returned what is expected, which comes from JSON.

    Tuples count as lists, keys of a mapping as text. A list of one value may stand for the value, as in TACO's data.
    """
    ours = _as_json(returned)
    if ours == expected:
        return True
    return isinstance(expected, list) and len(expected) == 1 and ours == expected[0]


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if line]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    words, others = ours.split(), theirs.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if not _NUMBER.fullmatch(ours) or not _NUMBER.fullmatch(theirs):
        return False
    if _WHOLE.fullmatch(theirs):
        return _is_whole_value(ours, theirs)
    number, expected = float(ours), float(theirs)
    # Numbers too large for floats are all infinite, and infinity is close to itself.
    return math.isfinite(expected) and math.isclose(number, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _is_whole_value(ours: str, theirs: str) -> bool:
    """Return whether a number is the same whole number, digit by digit, perhaps written as "4.0" or "+4"."""
    whole, _, rest = ours.partition(".")
    return not rest.strip("0") and _unsigned_zero(whole) == _unsigned_zero(theirs)


def _unsigned_zero(number: str) -> str:
    """Return a whole number without a plus, and without the minus that floats have before zero."""
    return "0" if number == "-0" else number.removeprefix("+")


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value
