# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The rewards of answers in a box, alone and after thinking, as tables."""

import pytest

from tests.kit.cases import each
from tests.unit.rewards.scoring import LONG, score

HANGS_SYMPY = "(" * 30 + "x" + "+sqrt(x+1))" * 30
ANSWERS = [
    # What is said, the reference, whether it is right, and whether there is a box.
    (r"It is \boxed{5}.", "5", 1, 1),
    (r"It is \boxed{5}.", r"\boxed{5}", 1, 1),
    (r"It is $\boxed{5}$", "5.0", 1, 1),
    (r"\fbox{5}", "5", 1, 1),
    (r"\boxed{6}", "5", 0, 1),
    (r"\boxed{-5}", "5", 0, 1),
    (r"\boxed{−5}", "-5", 1, 1),
    (r"\boxed{5.0001}", "5", 0, 1),
    # fractions
    (r"\boxed{\frac{1}{2}}", "0.5", 1, 1),
    (r"\boxed{1/2}", r"\frac12", 1, 1),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 0, 1),  # not reduced
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\sqrt{3}/2", 1, 1),
    (r"\boxed{3\frac{1}{2}}", "7/2", 1, 1),
    (r"\boxed{½}", "0.5", 1, 1),
    # intervals and tuples
    (r"\boxed{(1, 2]}", "(1,2]", 1, 1),
    (r"\boxed{(1, 2)}", "(1,2]", 0, 1),
    (r"\boxed{(2, 1)}", "(1,2)", 0, 1),
    (r"\boxed{\left(-\infty, \frac12\right)}", r"(-\infty, 0.5)", 1, 1),
    # units, thousands' commas, percent
    (r"\boxed{5\text{ cm}}", "5", 1, 1),
    (r"\boxed{5\,\mathrm{cm}^2}", "5", 1, 1),
    (r"\boxed{90^\circ}", "90", 1, 1),
    (r"\boxed{1,234}", "1234", 1, 1),
    (r"\boxed{1{,}234}", "1,234", 1, 1),
    (r"\boxed{50\%}", "50", 1, 1),
    # formulas
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1, 1),
    (r"\boxed{2x+2}", "2(x+1)", 1, 1),
    (r"\boxed{2x+1}", "2(x+1)", 0, 1),
    (r"\boxed{x=5}", "5", 1, 1),
    (r"\boxed{2π}", r"2\pi", 1, 1),
    # boxes in boxes, two answers, none
    (r"\boxed{\boxed{5}}", "5", 1, 1),
    (r"\boxed{4 or \boxed{5}}", "5", 1, 1),
    (r"It is \boxed{4}. No: \boxed{5}", "5", 1, 1),
    (r"It is \boxed{5}. No: \boxed{4}", "5", 0, 1),
    (r"\boxed{5 or 6}", "5", 0, 1),
    (r"\boxed{5, 6}", "5", 0, 1),
    ("It is 5.", "5", 0, 0),
    (r"It is \boxed{5", "5", 0, 0),
    (r"\boxed{}", "5", 0, 1),
    (r"\boxed{５}", "5", 1, 1),
    ("", "5", 0, 0),
    # long, and made to hang
    (LONG + r"\boxed{\frac{10}{2}x}", "5x", 1, 1),
    (r"\boxed{5}" + LONG, "5", 1, 1),
    (r"\boxed{" + LONG + "}", "5", 0, 1),
    (r"\boxed{" * 15_000, "5", 0, 0),
    (r"\boxed{9^{9^{9^9}}}", "5x", 0, 1),
    (rf"\boxed{{{HANGS_SYMPY}}}", "x", 0, 1),
    (r"\boxed{" + "1" * 100_000 + "}", "5", 0, 1),
]


@pytest.fixture(autouse=True)
def _little_time(monkeypatch):
    monkeypatch.setattr("relaxd.rewards.mathematics.equality.SYMPY_SECONDS", 0.5)


@each(("said", "answer", "accuracy", "form"), ANSWERS)
def test_math(said, answer, accuracy, form):
    assert score("math", said, answer) == {"reward": accuracy, "accuracy": accuracy, "format": form}


@each(("said", "answer", "accuracy", "form"), ANSWERS)
def test_deepscaler_is_math_after_the_thinking(said, answer, accuracy, form):
    expected = {"reward": accuracy, "accuracy": accuracy, "format": form, "thought": 1}
    assert score("deepscaler", rf"<think>\boxed{{7}}</think>{said}", answer) == expected
    assert score("deepscaler", f"{said}</think>", answer) == {"reward": 0, "accuracy": 0, "format": 0, "thought": 1}
    assert score("deepscaler", said, answer) == {"reward": 0, "accuracy": 0, "format": 0, "thought": 0}


@each(
    ("response", "accuracy", "thought"),
    [
        (r"<think>\boxed{4}</think> \boxed{5}", 1, 1),
        (r"\boxed{4}</think>\boxed{5}", 1, 1),
        (r"<think>\boxed{5}</think> It is 5.", 0, 1),
        (r"a</think>\boxed{5}</think>\boxed{4}", 0, 1),
        (r"a</think>\boxed{4}</think>\boxed{5}", 1, 1),
        (r"###Response \boxed{5}", 1, 1),
        (r"###Response \boxed{4} ###Response \boxed{5}", 1, 1),
        (r"\boxed{5} ###Response", 0, 1),
        (r"###Response \boxed{5} </think>", 0, 1),
        (r"###response \boxed{5}", 0, 0),
        (r"</THINK>\boxed{5}", 0, 0),
        (r"\boxed{5}", 0, 0),
        (r"<think>\boxed{5}", 0, 0),
        ("", 0, 0),
        ("</think>", 0, 1),
        (r"</think>" * 10_000 + r"\boxed{5}", 1, 1),
        (LONG + r"</think>\boxed{5}" + LONG, 1, 1),
        (r"</think>\boxed{5}" + "<think>" * 10_000, 1, 1),
    ],
)
def test_deepscaler_finds_the_end_of_the_thinking(response, accuracy, thought):
    scored = score("deepscaler", response, "5")
    assert (scored["reward"], scored["thought"]) == (accuracy, thought)


@each(("said", "answer", "accuracy", "form"), ANSWERS)
def test_geo3k_is_math_with_a_format(said, answer, accuracy, form):
    without = {"reward": 0.9 * accuracy, "accuracy": accuracy, "format": 0}
    assert score("geo3k", said, answer) == pytest.approx(without)
    is_boxed = float(r"\boxed{" in said and "}" in said)  # verl's pattern: <think>.*</think>.*\boxed\{.*\}.*
    thought = score("geo3k", f"<think>hm</think>{said}", answer)
    assert thought == pytest.approx(
        {"reward": 0.9 * accuracy + 0.1 * is_boxed, "accuracy": accuracy, "format": is_boxed}
    )


@each(
    ("response", "accuracy", "form"),
    [
        (r"<think>a</think> so \boxed{5}", 1, 1),
        (r"<think>a</think> so \boxed{4}", 0, 1),
        (r"<think></think>\boxed{5}", 1, 1),
        ("<think>a\nb</think>\n\\boxed{5}\nbye", 1, 1),
        (r"so \boxed{5}", 1, 0),
        (r"so <think>a</think>\boxed{5}", 1, 0),
        (r"<think>\boxed{5}</think>", 1, 0),
        (r"<think>\boxed{5}", 1, 0),
        (r"</think><think>\boxed{5}", 1, 0),
        (r"<think>a</think> so 5", 0, 0),
        (r"<think>a</think>\boxed{5", 0, 0),
        (r"<think>a</think>\fbox{5}", 1, 0),
        (r"<THINK>a</THINK>\boxed{5}", 1, 0),
        ("<think>" * 20_000, 0, 0),
        ("<think></think>" * 10_000 + r"\boxed{5}", 1, 1),
        ("<think>a</think>" + r"\boxed{" * 15_000, 0, 0),
        ("", 0, 0),
    ],
)
def test_geo3k_knows_the_format(response, accuracy, form):
    assert score("geo3k", response, "5") == pytest.approx(
        {"reward": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form}
    )
