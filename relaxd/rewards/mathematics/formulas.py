"""A safe parser of plain formulas into sympy: it runs no Python code and refuses formulas that would take too much
memory.

sympy's own parser calls eval on its text, which is unsafe for a model's answer.
"""

import re
from typing import Any

MAX_LETTERS = 400
MAX_DEPTH = 40
MAX_EXPONENT = 99
MAX_DIGITS = 60
MAX_BITS = 1000
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[a-z]+|\*\*|[-+*/^()\[\]|!]")
_FUNCTIONS = ("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "abs")
_CONSTANTS = ("pi", "infinity")
_WORD = re.compile("|".join((*_FUNCTIONS, *_CONSTANTS, "[a-z]")))


class Unreadable(ValueError):
    """The text is no formula, or an unsupported one."""


def parse(text: str) -> Any:
    """Return a plain formula as a sympy expression.

    Understands numbers, letters, + - * / ^, brackets, implied products, sqrt, sin, cos, tan, log, ln, exp, abs and pi.

    Raises Unreadable if the text is no such formula, is longer than 400 characters, or has exponents above 99 or nested
    exponents.
    """
    if len(text) > MAX_LETTERS:
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
    """Recursive descent parser. Each method parses the rule in its name."""

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
