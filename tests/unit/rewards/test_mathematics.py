# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The rewards of mathematics, as tables: what they find in a reply, and what they take for equal."""

import math as numbers
import time
from contextlib import suppress

import pytest

from relaxd.rewards.interface import TooSlow, time_limit
from relaxd.rewards.mathematics.equality import SYMPY_SECONDS, Unreadable, are_equal, parse
from relaxd.rewards.mathematics.normal_forms import last_boxed
from tests.kit.cases import each
from tests.unit.rewards.scoring import LONG, score

HANGS_SYMPY = "(" * 30 + "x" + "+sqrt(x+1))" * 30


@each(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed 5$", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x = \boxed{5} cm}", "5"),
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\boxed{4 and \boxed{5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"{\boxed{5}}", "5"),
        (r"\boxed \boxed{5}", r"\boxed"),
        (r"\boxed x\boxed{5}", r"x\boxed"),
        (r"\fbox 4 \boxed{5}", "5"),
        (r"\boxed{4} \fbox{5}", "5"),
        (" " * 50 + r"\boxed{5}", "5"),
        (r"\boxed" + " " * 50 + r"\boxed{5}", r"\boxed"),
        (r"} { \boxed{5}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        (r"\boxedx{5}", None),
        ("5", None),
        ("", None),
        (r"\boxed{" * 20_000, None),
        (r"\boxed{" * 20_000 + "}" * 20_000, ""),
        (LONG + r"\boxed{5}" + LONG, "5"),
    ],
)
def test_the_last_box_that_is_closed(text, content):
    assert last_boxed(text) == content


EQUAL = [
    ("5", "5"),
    ("1/2", r"\frac12"),
    ("0.5", r"\frac{1}{2}"),
    (".5", "0.5"),
    (r"\dfrac{3}{2}", "3/2"),
    (r"\frac 1 2", r"\tfrac{1}{2}"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"\frac{-1}{2}", "-0.5"),
    ("1,234", "1234"),
    ("1{,}234,567", "1234567"),
    (r"1,\!234", "1234"),
    ("1,234.50", r"\$1234.5"),
    (r"\frac{-2}{4}", r"-\frac{1}{2}"),
    (r"-\frac{-1}{2}", "0.5"),
    ("7 3/4", r"\frac{31}{4}"),
    (r"7\frac{3}{4}", "7.75"),
    ("-7 3/4", "-31/4"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"2\sqrt3", "√12"),
    (r"3\sqrt[3]{2}", r"\sqrt[3]{54}"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ("(1,2]", "( 1 , 2 ]"),
    (r"(-\infty, 2)", "(-∞,2)"),
    (r"\left(1,\frac12\right)", "(1, 0.5)"),
    (r"\{1,2\}", r"\left\{1, 2\right\}"),
    ("1 or 2", "1, 2"),
    (r"5\text{ cm}", "5"),
    (r"5\,\mathrm{cm}^2", "5"),
    ("5 cm", "5"),
    ("100 meters", "100"),
    ("3 million", "3,000,000"),
    ("2.5 billion", "2500000000"),
    ("50%", r"50\%"),
    (r"\$5", "5"),
    (r"90^\circ", "90"),
    ("90°", "90^{\\circ}"),
    ("x=5", "5"),
    ("5x+3", "3+5x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x²", "x^{2}"),
    ("½", "1/2"),
    ("2⅓", "7/3"),
    ("−3", "-3"),
    ("３", "3"),
    ("2π", r"2\pi"),
    (r"\text{Monday}", "Monday"),
    (r"\text{Monday}", "monday"),
    ("A", "A"),
    ("5.0", "5"),
    ("-.0", "0"),
    ("(5)", "5"),
    (r"2\sin(x)\cos(x)", r"\sin(2x)"),
    ("12:30", "12:30"),
    ("1/0", "1/0"),
]
DIFFERENT = [
    ("5", "6"),
    ("", "5"),
    ("-5", "5"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),  # not reduced
    ("0.333", r"\frac{1}{3}"),
    ("73/4", "7 3/4"),
    ("7 3/4", "73/4"),
    ("1234", "1,2,34"),
    ("(1,2]", "(1,2)"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "(1,2,3)"),
    ("(1,234)", "1234"),
    ("2, 1", "1, 2"),
    ("1", "1, 2"),
    ("2*3", "6"),  # a whole number must be written as one
    ("5.5", "5"),
    ("4/2", "2"),
    (r"\frac{1}{2}", "0.51"),
    ("0.50000000000000000001", "1/2"),
    ("50%", "0.5"),
    ("a+b+c+0*d", "a+b+c"),
    ("x", "y"),
    ("2π", "2"),
    ("3.14", r"\pi"),
    ("1/0", "2/0"),
    ("9^9^9", "1"),
    ("9^{9^{9}}", "9^{9^{8}}"),
    ("9^(9999999999)", "5x"),
    ("((((9^99)^99)^99)^99)^99", "5x"),
    ("1" * 3000, "1" * 2999 + "2"),
    ("((((((", "5"),
    (")", "x"),
    ("x+", "x"),
    (HANGS_SYMPY, "x"),
    ("__import__('os').system('false')", "0x"),
    ("True", "1"),
    ("١", "2"),
]


@each(("answer", "expected"), EQUAL)
def test_equal_answers(answer, expected):
    assert are_equal(answer, expected)
    assert are_equal(expected, answer)


@each(("answer", "expected"), DIFFERENT)
def test_different_answers(answer, expected):
    begun = time.process_time()
    assert not are_equal(answer, expected)
    assert not are_equal(expected, answer)
    assert time.process_time() - begun < 2 * SYMPY_SECONDS + 1


@each(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("-2^2", -4),
        ("2^-1", 0.5),
        ("(1+2)(3)", 9),
        ("6/2/3", 1),
        ("2sqrt(9)", 6),
        ("abs(-3)", 3),
        (".5", 0.5),
    ],
)
def test_formulas_have_the_usual_precedence(text, value):
    assert numbers.isclose(float(parse(text)), value)


@each("text", ["", "1+", "(1", "1)", "x.__class__", "2^2^2", "2^100", "1" * 401, "(" * 50 + "1" + ")" * 50])
def test_other_formulas_are_not_tried(text):
    with pytest.raises(Unreadable):
        parse(text)


@each("name", ["math", "deepscaler", "dapo", "geo3k", "openr1mm", "gsm8k"])
@each("answer", ["", " \n", r"\boxed{}"])
def test_a_missing_reference_is_no_silent_zero(name, answer):
    with pytest.raises(ValueError, match="needs a"):
        score(name, r"\boxed{}", answer)


@each(
    ("response", "answer", "accuracy", "form"),
    [
        ("Answer: 34", "34", 1, 1),
        ("answer : 34", "34", 1, 1),
        ("Answer: 33\nAnswer: 34", "34", 1, 1),
        ("Answer: 34\nAnswer: 33", "34", 0, 1),
        ("Answer: $34$", "34", 1, 1),
        (r"Answer: \boxed{34}", "34", 1, 1),
        (r"Answer: $\boxed{34}$.", "34", 1, 1),
        ("Answer: 34.", "34", 1, 1),
        ("Answer: 34.0", "34", 1, 1),
        ("Answer: 1,234", "1234", 1, 1),
        ("Answer: 34", "34.0", 1, 1),
        ("Answer: -34", "34", 0, 1),
        ("Answer: x = 34", "34", 1, 1),
        ("Answer: 34 dollars", "34", 1, 1),
        ("Answer: 34 degrees", "34^\\circ", 1, 1),
        (r"Answer: 34\text{ cm}", "34", 1, 1),
        (r"Answer: \frac12", r"\frac{1}{2}", 1, 1),
        (r"Answer: \sqrt3", r"\sqrt{3}", 1, 1),
        (r"Answer: \dfrac12", r"\frac{1}{2}", 0, 1),
        ("Answer: 0.5", r"\frac{1}{2}", 0, 1),
        ("Answer: 34 or 35", "34", 0, 1),
        ("Answer: (1,2]", "(1,2]", 1, 1),
        ("Answer: $(1, 2]$", "(1,2]", 1, 1),
        ("Answer: (1,2)", "(1,2]", 0, 1),
        ("Answer: [1,2]", "(1,2]", 0, 1),
        (r"Answer: (-\infty, 3)", r"(-\infty,3)", 1, 1),
        ("Answer: thirty-four", "34", 0, 1),
        ("Answer:", "34", 0, 0),
        ("Answers: 34", "34", 0, 0),
        ("34", "34", 0, 0),
        ("", "34", 0, 0),
        ("Answer: 34" + " " * 400, "34", 0, 0),
        ("Answer: 33\n" + LONG + "Answer: 34", "34", 1, 1),
        ("Answer: ３４", "34", 0, 1),
        ("Answer: " + "$" * 250, "34", 0, 1),
        ("Answer: " + "\\text{" * 40, "34", 0, 1),
    ],
)
def test_dapo(response, answer, accuracy, form):
    assert score("dapo", response, answer) == {"reward": 2 * accuracy - 1, "accuracy": accuracy, "format": form}


@pytest.mark.parametrize(
    ("response", "answer", "accuracy"),
    [
        ("<answer>5</answer>", "5", 1),
        ("<think>a</think><answer>5</answer>", "<answer>5</answer>", 1),
        (r"<answer>$\frac{1}{2}$</answer>", "0.5", 1),
        (r"<answer>\boxed{\frac{2}{4}}</answer>", r"\frac{1}{2}", 1),
        (r"<answer>$x^2+2x+1$</answer>", "$(x+1)^2$", 1),
        ("<answer>1,234</answer>", "1234", 1),
        (r"<answer>$(1,2]$</answer>", "$(1,2]$", 1),
        (r"<answer>$(1,2)$</answer>", "$(1,2]$", 0),
        (r"<answer>$\{2,1\}$</answer>", r"$\{1,2\}$", 1),
        (r"<answer>$5\,\text{cm}$</answer>", "5", 1),
        ("<answer>50%</answer>", "50%", 1),
        ("<answer>Paris</answer>", "Paris", 1),
        ("<answer> Paris\n</answer>", "Paris", 1),
        ("<answer>paris</answer>", "Paris", 0),
        ("<answer>6</answer>", "5", 0),
        ("<answer></answer>", "5", 0),
        ("<answer>5 or 6</answer>", "5", 0),
        ("<answer>4</answer><answer>5</answer>", "5", 0),
        ("<answer>5</answer></think></think>", "5", 0),
        ("the answer is 5", "5", 1),
        (r"so \boxed{5}", "5", 1),
        (r"so \boxed{4}", "5", 0),
        ("no idea", "5", 0),
        ("", "5", 0),
        ("5 is wrong, it is 6", "5", 0),
        ("π", r"$\pi$", 1),
        (LONG + "<answer>5</answer>", "5", 1),
        ("<answer>" + LONG + "</answer>", "5", 0),
        (r"<answer>$9^{9^{9^{9}}}$</answer>", "5", 0),
        (r"<answer>$" + "(" * 400 + "x" + ")" * 400 + "$</answer>", "5", 0),
        ("<answer>" * 20_000, "5", 0),
    ],
)
def test_openr1mm(response, answer, accuracy, monkeypatch):
    if not accuracy:  # some would compute for ever; what is right has the time that it has in a run
        monkeypatch.setattr("relaxd.rewards.mathematics.openr1mm.VERIFY_SECONDS", 0.5)
    assert score("openr1mm", response, answer)["reward"] == accuracy


def test_a_limit_of_time_passes_through_what_catches_exceptions():
    def never_ends():
        with time_limit(0.05):
            while True:
                with suppress(Exception):
                    sum(range(1000))

    with pytest.raises(TooSlow):
        never_ends()
    sum(range(10_000_000))  # the timer is off again
