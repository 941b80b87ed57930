"""Equality of mathematical answers: the rules of DeepScaleR's and PRIME's graders, which come from PRM800K's
(Lightman et al. 2023, arXiv 2305.20050).
"""

import re
from decimal import Decimal
from itertools import chain

from relaxd.rewards.interface import TooSlow, time_limit
from relaxd.rewards.mathematics.formulas import Unreadable, parse
from relaxd.rewards.mathematics.normal_forms import normalize, numeral, plain, rational

MAX_LETTERS = 2000
"""Maximum length of answers, in characters; longer answers are compared as plain texts."""
MAX_UNKNOWNS = 2
"""Maximum number of unknown letters in expressions that sympy compares."""
SYMPY_SECONDS = 2.0
"""Maximum seconds for sympy to compare two expressions; slower ones count as different."""
_FRACTION = re.compile(r"-?\(?-?[0-9]+/-?[0-9]+\)?")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_NAME = re.compile(r"\A[a-z]{1,2}=(?!=)")
_DIGIT = re.compile(r"[0-9]")
_SCIENTIFIC = re.compile(
    r"(\A|[=(\[{,;&$<>]|\b(?:or|and)\b)(\s*[+-]?)([0-9]{1,12}(?:\.[0-9]{1,12})?[eE][+-]?[0-9]{1,2})"
    r"(?=\s*(?:[,;=<>)\]}&$%\\]|\Z)|\s+[A-Za-z])"
)
"""Pattern of a number like 1e3 that stands alone: a whole answer, after "x =", an item, or before a unit."""
_MATRIX = re.compile(
    r"(?:\\left *[(\[])?\s*\\begin *\{(?P<kind>[pbB]?(?:small)?matrix|array)\}(?: *\{[clr| ]*\})?"
    r"(?P<cells>.*?)\\end *\{(?P=kind)\}\s*(?:\\right *[)\]])?",
    re.DOTALL,
)
"""Pattern of a matrix; round and square brackets are equivalent."""
_MATRIX_LAYOUT = re.compile(
    r"(\\\\)(?:\s*\[[^\[\]]*\])?|\\cr(?![a-z])|\\(?:displaystyle|hline)(?![a-z])|\\[!,;:()\[\] ]|\$"
)
"""Pattern of markup without effect on a matrix, and of row ends."""
_MATRIX_NAME = re.compile(
    r"\s*(?:\\(?:mathbf|mathrm|boldsymbol|bm|vec)\s*)?(?:\{[A-Za-z]\}|[A-Za-z])(?:_\{?\w\}?)?\s*=\s*"
)


def are_equal(answer: str, expected: str) -> bool:
    """Return whether an answer equals the reference: as text in MATH's normal form, or as formulas for sympy.

    Tuples and intervals need the same brackets and are compared item by item. Two fractions of whole numbers must be
    equal as texts, so an unreduced fraction is wrong. A whole number equals only a number written as such, 1e3
    included. Matrices are compared entry by entry. A fast path compares ordinary numbers.
    """
    if len(answer) > MAX_LETTERS or len(expected) > MAX_LETTERS:
        return answer.strip() == expected.strip()
    if answer == expected and "=" not in answer and _DIGIT.search(answer):
        return True  # the normal forms aren't empty, and equal
    matrices, expected_matrices = _matrices(answer), _matrices(expected)
    if matrices or expected_matrices:
        return _are_equal_matrices(matrices, expected_matrices) or normalize(answer) == normalize(expected)
    answer, expected = written_out(answer), written_out(expected)
    number, expected_number = numeral(answer), numeral(expected)
    if number is not None and expected_number is not None:  # for numbers both comparisons agree
        return _is_equal_item(number, expected_number)
    normal = normalize(answer)
    return bool(normal) and (normal == normalize(expected) or _are_equal_formulas(plain(answer), plain(expected)))


_Matrices = list[str | list[list[str]]]
"""An answer with matrices: the texts between them, and the entries of each by row."""


def _matrices(answer: str) -> _Matrices:
    """Return an answer's matrices, with the texts before, between and after them; [] if there are none."""
    if "\\begin" not in answer:
        return []
    text = _MATRIX_LAYOUT.sub(lambda found: r"\\" if found[1] or found[0] == r"\cr" else "", answer)
    found: _Matrices = []
    place = 0
    for matrix in _MATRIX.finditer(text):
        rows = matrix["cells"].strip().removesuffix(r"\\").split(r"\\")
        found += [text[place : matrix.start()], [[cell.strip() for cell in row.split("&")] for row in rows]]
        place = matrix.end()
    if not found:
        return []
    first = str(found[0])
    return ["" if _MATRIX_NAME.fullmatch(first) else first, *found[1:], text[place:].strip().rstrip(".")]


def _are_equal_matrices(found: _Matrices, expected: _Matrices) -> bool:
    """Return True if matrices are equal entry by entry, and the texts between them are equal in normal form."""
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            same = normalize(str(one)) == normalize(str(other))
        else:
            same = [len(row) for row in one] == [len(row) for row in other] and all(
                map(are_equal, chain.from_iterable(one), chain.from_iterable(other))
            )
        if not same:
            return False
    return True


def written_out(answer: str) -> str:
    """Return an answer with numbers like 1e3 written as 1000."""
    return _SCIENTIFIC.sub(lambda found: f"{found[1]}{found[2]}{Decimal(found[3]):f}", answer)


def _are_equal_formulas(answer: str, expected: str) -> bool:
    answer, expected = (_NAME.sub("", text, count=1) if text.count("=") == 1 else text for text in (answer, expected))
    if answer == expected:
        return bool(answer)
    items, expected_items = _items(answer), _items(expected)
    if len(items) != len(expected_items):
        return False
    if len(items) > 1 and _brackets(answer) != _brackets(expected):
        return False
    return all(_is_equal_item(*pair) for pair in zip(items, expected_items, strict=True))


def _is_equal_item(answer: str, expected: str) -> bool:
    if answer == expected:
        return bool(answer)
    if _FRACTION.fullmatch(answer) and _FRACTION.fullmatch(expected):
        return re.sub(r"[()]", "", answer) == re.sub(r"[()]", "", expected)
    whole, expected_whole = _whole(answer), _whole(expected)
    if whole is not None or expected_whole is not None:
        return whole == expected_whole
    value, expected_value = rational(answer), rational(expected)
    if value is not None and expected_value is not None:
        return value == expected_value
    try:
        with time_limit(SYMPY_SECONDS):
            return _is_zero_difference(answer, expected)
    except (TooSlow, Unreadable, RecursionError):
        return False
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):  # sympy's on odd input
        return False


def _is_zero_difference(answer: str, expected: str) -> bool:
    import sympy

    left, right = parse(answer), parse(expected)
    letters = left.free_symbols | right.free_symbols
    if len(letters) > MAX_UNKNOWNS or left.free_symbols != right.free_symbols:
        return False
    difference = left - right
    if not letters and difference.is_finite is not False and abs(sympy.N(difference, 30)) > 1e-12:
        return False  # faster than simplify, for the many wrong answers
    return bool(sympy.simplify(difference) == 0)


def _whole(text: str) -> int | None:
    """Return the value of a whole number, which may be written as "5.0"; None for other text."""
    if not _NUMBER.fullmatch(text):
        return None
    before, _, after = text.partition(".")
    if after.strip("0") or len(before) >= 4000:
        return None
    return int(before) if before[-1:].isdigit() else 0  # "-.0" has only a sign before its point


def _brackets(text: str) -> str:
    return text[0] + text[-1] if text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}") else ""


def _items(text: str) -> list[str]:
    """Split a tuple, interval or list at the commas that no bracket encloses."""
    inside = text[1:-1] if _brackets(text) and "," in text else text
    items, depth, start = [], 0, 0
    for place, letter in enumerate(inside):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            items.append(inside[start:place])
            start = place + 1
    return [*items, inside[start:]]
