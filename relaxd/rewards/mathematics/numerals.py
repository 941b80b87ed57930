"""Ordinary numbers, which are read and compared without the rules, the parser and sympy that other answers need."""

import re
from fractions import Fraction

from relaxd.rewards.mathematics.plain import UNIT

MAX_LETTERS = 60
"""Longest number. The parser reads no longer numbers either."""
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_WRITTEN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|" + _DECIMAL + ")(?:/[0-9]+)?"
_SUFFIX = rf" *\\?%|\^\\circ|\^\{{\\circ\}}|°|(?:\\,)? *(?:{UNIT}|\\(?:text|mathrm)\{{ *{UNIT} *\}})"
_NUMERAL = re.compile(
    rf"(?:\\?\$ *)?(?P<sign>-?)(?:(?P<written>{_WRITTEN})"
    r"|\\[dt]?frac(?:(?P<a>[0-9])(?P<b>[0-9])|\{(?P<minus>-?)(?P<above>[0-9]+)\}\{(?P<below>[0-9]+)\}))"
    rf"(?:{_SUFFIX})? *\$?"
)
_RATIONAL = re.compile(rf"(-?)(\()?(?:({_DECIMAL})|\((-{_DECIMAL})\))(?:/({_DECIMAL}))?(?(2)\))")


def numeral(answer: str) -> str | None:
    """Return what `plain` returns, sooner, if an answer is an ordinary number; None if it may be anything else.

    Ordinary are whole numbers, decimals and fractions of whole numbers, also with \\frac, thousands' commas, dollars,
    percent, degrees and units.
    """
    if len(answer) > MAX_LETTERS or not (match := _NUMERAL.fullmatch(answer.strip())):
        return None
    sign = match["sign"]
    if match["written"]:
        return f"{sign}{match['written'].replace(',', '')}"
    above, below = match["above"] or match["a"], match["below"] or match["b"]
    fraction = f"(-{above})/{below}" if match["minus"] else f"{above}/{below}"
    return f"-({fraction})" if sign else fraction


def rational(text: str) -> Fraction | None:
    """Return the value of a plain formula that is a decimal or a fraction of decimals; None for anything else."""
    if len(text) > MAX_LETTERS or not (match := _RATIONAL.fullmatch(text)):
        return None
    sign, _, above, negative, below = match.groups()
    divisor = Fraction(below or 1)
    if not divisor:
        return None
    value = Fraction(above or negative) / divisor
    return -value if sign else value
