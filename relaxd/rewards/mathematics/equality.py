"""Equality of mathematical answers: the rules of DeepScaleR's and PRIME's graders, which come from PRM800K's
(Lightman et al. 2023, arXiv 2305.20050), and a safe parser of formulas.

The parser makes sympy's expressions without running Python code, and refuses formulas that would take too much memory;
sympy's own parser calls eval on its text, which is unsafe for a model's answer."""

import re
from decimal import Decimal
from itertools import chain
from typing import Any

from relaxd.rewards.interface import TooSlow, time_limit
from relaxd.rewards.mathematics.normal_forms import normalize, numeral, plain, rational

MAX_LETTERS = 2000
"""Maximum length of answers, in characters; longer answers are compared as plain texts."""
MAX_UNKNOWNS = 2
"""Maximum number of different variables in expressions that sympy compares."""
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
"""Pattern of a number such as 1e3 that is no part of a formula: the whole answer, an item of a list, the text after
"x =", or the number before a unit."""
_MATRIX = re.compile(
    r"(?:\\left *[(\[])?\s*\\begin *\{(?P<kind>[pbB]?(?:small)?matrix|array)\}(?: *\{[clr| ]*\})?"
    r"(?P<cells>.*?)\\end *\{(?P=kind)\}\s*(?:\\right *[)\]])?",
    re.DOTALL,
)
"""Pattern of a matrix in LaTeX, with optional round or square brackets, which are equivalent."""
_MATRIX_LAYOUT = re.compile(
    r"(\\\\)(?:\s*\[[^\[\]]*\])?|\\cr(?![a-z])|\\(?:displaystyle|hline)(?![a-z])|\\[!,;:()\[\] ]|\$"
)
"""Pattern of LaTeX layout commands that don't change a matrix, and of the marks that end its rows."""
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
"""An answer split at its matrices: texts alternate with matrices, which are lists of rows of entries."""


def _matrices(answer: str) -> _Matrices:
    """Split an answer into its matrices and the texts before, between and after them; [] if it has no matrix."""
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
    """Return an answer with numbers in scientific notation, such as 1e3, written out as 1000."""
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


MAX_FORMULA = 400
MAX_DEPTH = 40
MAX_EXPONENT = 99
MAX_DIGITS = 60
MAX_BITS = 1000
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[a-z]+|\*\*|[-+*/^()\[\]|!]")
_FUNCTIONS = ("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "abs")
_CONSTANTS = ("pi", "infinity")
_WORD = re.compile("|".join((*_FUNCTIONS, *_CONSTANTS, "[a-z]")))


class Unreadable(ValueError):
    """A text can't be parsed as a formula, or the formula isn't supported."""


def parse(text: str) -> Any:
    """Return a plain formula as a sympy expression.

    Understands numbers, letters, + - * / ^, brackets, implied products, sqrt, sin, cos, tan, log, ln, exp, abs and pi.

    Raises Unreadable if the text is no such formula, is longer than 400 characters, or has exponents above 99 or nested
    exponents.
    """
    if len(text) > MAX_FORMULA:
        raise Unreadable("too long")
    tokens: list[str] = []
    place = 0
    for match in _TOKEN.finditer(text):
        if match.start() != place:
            break
        word, place = match.group(), match.end()
        tokens += _WORD.findall(word) if word.isalpha() else ["^" if word == "**" else word]
    if place != len(text) or not tokens:
        raise Unreadable(f"{text[place : place + 20]!r} is not understood")
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.next:
        raise Unreadable(f"{parser.next!r} is not understood")
    return value


class _Parser:
    """Recursive descent parser of formulas; each method parses the grammar rule in its name."""

    def __init__(self, tokens: list[str]) -> None:
        import sympy

        self._sympy = sympy
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._powers = 0

    @property
    def next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self.next
        self._place += 1
        return token

    def sum(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        value = self._product()
        while self.next in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        self._depth -= 1
        return value

    def _product(self) -> Any:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._power()
        while self.next and self.next not in ("+", "-", ")", "]", "|", "^", "!"):
            sign = self._take() if self.next in ("*", "/") else "*"
            factor = self._signed_power()
            value = value / factor if sign == "/" else value * factor
        return -value if negative else value

    def _signed_power(self) -> Any:
        if self.next == "-":
            self._take()
            return -self._power()
        return self._power()

    def _power(self) -> Any:
        base = self._atom()
        if self.next != "^":
            return base
        self._take()
        self._powers += 1
        before = self._powers
        exponent = self._signed_power()
        if self._powers != before:
            raise Unreadable("an exponent within an exponent isn't tried")
        if self._powers > 8:
            raise Unreadable("too many powers")
        if exponent.is_number and not abs(exponent) <= MAX_EXPONENT:
            raise Unreadable(f"an exponent above {MAX_EXPONENT} isn't tried")
        if base.is_Rational and base != 0 and base.p.bit_length() + base.q.bit_length() > MAX_BITS:
            raise Unreadable("a power of so long a number isn't tried")
        return base**exponent

    def _atom(self) -> Any:
        token = self._take()
        if token and (token[0].isdigit() or token[0] == "."):
            if len(token) > MAX_DIGITS:
                raise Unreadable("too many digits")
            return self._sympy.Rational(token)
        if token in ("(", "["):
            value = self.sum()
            if self._take() != {"(": ")", "[": "]"}[token]:
                raise Unreadable("a bracket isn't closed")
            return value
        if token == "pi":
            return self._sympy.pi
        if token == "infinity":
            return self._sympy.oo
        if token in _FUNCTIONS:
            function = {"ln": "log", "abs": "Abs"}.get(token, token)
            return getattr(self._sympy, function)(self._power())
        if token.isalpha():
            return self._sympy.Symbol(token)
        raise Unreadable(f"{token!r} is not understood" if token else "something is missing at the end")
