# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The short ways of the rewards of mathematics give what the long ways give, on answers that are made at random."""

import re
from fractions import Fraction
from itertools import product
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from relaxd.rewards import RewardInput, resolve
from relaxd.rewards.mathematics import equality, normal_forms
from relaxd.rewards.mathematics.equality import are_equal
from relaxd.rewards.mathematics.normal_forms import last_boxed, normalize, numeral, plain, rational
from tests.kit.cases import each

DIGITS = ("0", "1", "2", "4", "5", "25", "50", "007", "1234", "1,234", "12,34", "0.5", ".5", "0.50", "2.0", "1,234.0")
FRACTIONS = (
    "1/2", "2/4", "2/1", "1/0", "1.0/2", r"\frac12", r"\dfrac{1}{2}", r"\tfrac{2}{4}", r"\frac{-1}{2}", r"\frac 1 2",
    r"\frac{ 1 }{2}", r"\frac{1.5}{2}", r"\frac{\frac12}{2}", "½", "1 1/2", r"1\frac12",
)  # fmt: skip
UNITS = (
    "cm", " cm", "feet", " inches", " miles", r"\text{ cm}", r"\text{cm}", r"\,\mathrm{cm}", " cm^2", " apples", "s",
    r"\text{ apples}", "%", r"\%", r" \%", "°", r"^\circ", r"^{\circ}", " million", ".",
)  # fmt: skip
SPELLINGS = (
    ("", "$", r"\$", "$ ", " ", "x=", "+"),
    ("", "-", "--", "−"),
    DIGITS + FRACTIONS,
    ("", *UNITS),
    ("", "$", " $"),
)  # fmt: skip
NUMBERS = st.tuples(*map(st.sampled_from, SPELLINGS)).map("".join)
PIECES = st.lists(
    st.sampled_from((*DIGITS, *FRACTIONS, *UNITS, *r"-+,./ ${}()\%", r"\frac", "{1}", "{-2}")), max_size=5
).map("".join)
ANSWERS = NUMBERS | PIECES
TEXTS = st.lists(
    st.sampled_from((r"\boxed{", r"\fbox {", r"\boxed", r"\{", r"\}", "{", "}", "\\", "x", "5", "\n", "boxed{")),
    max_size=14,
).map("".join)
MARKS = (
    r"\boxed{", r"\boxed", r"\boxed ", r"\boxed x", r"\fbox{", r"\{", "{", "}", "5", "1,234", "=", "x", " ", "$",
    "####", "#", "+", ".", r"\text{ 5}", "°", r"\!", "</think>", "\n", "−",
)  # fmt: skip
BEGINNINGS = st.sampled_from(("", "<think>", "<think>x</think>"))
REPLIES = st.tuples(BEGINNINGS, st.lists(st.sampled_from(MARKS), max_size=12).map("".join)).map("".join)


def are_equal_at_length(answer: str, expected: str) -> bool:
    """Compare as if no number were ordinary: by MATH's normal form, the rules, the parser and sympy."""
    with patch.object(equality, "numeral", return_value=None), patch.object(equality, "rational", return_value=None):
        return are_equal(answer, expected)


def test_every_two_numbers_are_equal_if_the_rules_and_sympy_say_so():
    numbers = [*DIGITS, *FRACTIONS[:9], "-0.5", "-1/2", r"-\frac{1}{2}", r"-\frac{-1}{2}", "50%", r"\$5", "5 cm"]
    short = {pair: are_equal(*pair) for pair in product(numbers, repeat=2)}
    assert short == {pair: are_equal_at_length(*pair) for pair in short}


@settings(max_examples=200)
@given(ANSWERS, ANSWERS)
def test_ordinary_numbers_are_equal_if_the_rules_and_sympy_say_so(answer, expected):
    assert are_equal(answer, expected) == are_equal_at_length(answer, expected)


def test_an_ordinary_number_is_read_as_any_formula_is():
    answers = list(map("".join, product(*SPELLINGS)))
    read = {answer: number for answer in answers if (number := numeral(answer)) is not None}
    assert read == {answer: plain(answer) for answer in read}
    assert len(answers) / 20 < len(read) < len(answers)


@settings(max_examples=300)
@given(PIECES)
def test_what_looks_like_a_number_is_read_as_any_formula_is(answer):
    assert numeral(answer) in (None, plain(answer))


@each(
    ("answer", "value"),
    [
        ("12", 12),
        ("-1,234,567.25", Fraction(-123456725, 100)),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        (r"\frac{-10}{4}", Fraction(-5, 2)),
        (r"-\dfrac12", Fraction(-1, 2)),
        (r"$50\%$", 50),
        (r"\$ 5", 5),
        (r"90^\circ", 90),
        (r"5\,\text{cm}", 5),
        ("7 miles", 7),
        ("1/0", None),
        ("12,34", None),
        ("7 3/4", None),
        ("x", None),
        (r"\frac{x}{2}", None),
        (r"2\pi", None),
        ("2^3", None),
        ("1" * 61, None),
        ("", None),
    ],
)
def test_which_numbers_are_ordinary(answer, value):
    read = numeral(answer)
    assert (None if read is None else rational(read)) == value


@settings(max_examples=300)
@given(TEXTS)
def test_the_last_box_is_the_last_that_trying_each_finds_closed(text):
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    contents = [text[start:end].strip() for start in starts if (end := closing(text, start)) is not None]
    assert last_boxed(text) == (contents[-1] if contents else None)


def closing(text: str, start: int) -> int | None:
    """Return where the brace before `start` is closed; a brace after a single backslash doesn't count."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] in "{}" and not re.search(r"(?<!\\)\\\Z", text[:place]):
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return place
    return None


@settings(max_examples=1000)
@given(REPLIES)
def test_short_ways_give_what_the_long_ones_do(text):
    found = last_boxed(text)
    with patch.object(normal_forms, "_TAIL", 0):
        assert last_boxed(text) == found
    assert are_equal(text, text) == bool(numeral(text) or normalize(text))
    thought = re.match(r"(?s)<think>.*</think>.*\\boxed\{.*\}", text.strip())
    assert resolve("geo3k")(RewardInput("", text, "5"))["format"] == bool(thought)
    marked = re.findall(r"####\s*+\$?+\s*+([-−]?[0-9.,]*[0-9])([ \t]*+[-−+*/^][ \t]*+[0-9(])?", text[-300:])
    assert resolve("gsm8k")(RewardInput("", text, "5"))["format"] == bool(marked and not marked[-1][1])
