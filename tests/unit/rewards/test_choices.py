# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The rewards of questions with choices, as tables."""

import pytest

from tests.kit.cases import each
from tests.unit.rewards.scoring import LONG, score


@each(
    ("response", "chosen"),
    [
        ("B", "B"),
        ("The answer is B", "B"),
        ("The answer is (B).", "B"),
        ("The answer is **B**", "B"),
        ("answer: B", "B"),
        ("Answer is: B", "B"),
        ("ANSWER = B", "B"),
        ("The correct option is B because A is false", "B"),
        ("My choice: B", "B"),
        ("The answer is option B", "B"),
        ("The answer is A. No, the answer is B.", "B"),
        ("B is the correct one, not A", "B"),
        ("(B) is correct", "B"),
        ("Final answer - B", "B"),
        ("Final Answer: **(B)**", "B"),
        (r"Therefore \boxed{B}", "B"),
        (r"Therefore \boxed{\text{B}}", "B"),
        (r"The answer is \boxed{B}", "B"),
        (r"The answer is $\boxed{\mathrm{B}}$", "B"),
        ("A or B? I'd say B", "B"),
        ("<think>The answer is A</think> B", "B"),
        ("The answer is A</think>The answer is B", "B"),
        ("<think>The answer is B", None),
        ("The answer is Bonn", None),
        ("The answer is b", None),
        ("Die Antwort: naïve Idee, the answer is “B”", "B"),
        ("The answer is Bö", None),
        ("École É, Ärger, Aé", None),
        ("The answer is Β", None),  # a Greek letter
        ("答案是 B。", "B"),
        ("The answer is A or B", "A"),  # the pattern's first letter, as in Relax
        ("I don't know", None),
        ("The answer is Z", None),
        ("", None),
        (LONG + "The answer is B", "B"),
        ("The answer is " + "(" * 100_000, None),
        ("answer is " * 10_000, None),
        ("The answer is A " + LONG, "A"),
        ("The answer is" + " " * 100_000, None),
        ("A" + " " * 100_000, "A"),
        ("</think>" + "<think>" * 14_000, None),
        ("<think>a</think>B " * 6000, "B"),
    ],
)
def test_gpqa_finds_the_letter(response, chosen):
    for right in ("A", "B"):
        assert score("gpqa", response, right) == {
            "reward": chosen == right,
            "accuracy": chosen == right,
            "format": chosen is not None,
        }


@each(
    ("answer", "metadata", "right"),
    [
        ("B", {}, "B"),
        ("(b)", {}, "B"),
        ("A", {"correct_letter": "B"}, "B"),
        ("", {"correct_letter": "b"}, "B"),
        ("1", {"choices": ["x", "y"]}, "B"),
        ("Green  tea", {"choices": ["black tea", "green tea!"]}, "B"),
        ("7", {"choices": ["6", "7"]}, "B"),
        ("D", {"valid_letters": ["C", "D"]}, "D"),
        ("J", {"choices": list("abcdefghij")}, "J"),
    ],
)
def test_gpqa_knows_the_right_letter(answer, metadata, right):
    assert score("gpqa", f"the answer is {right}", answer, metadata)["reward"] == 1
    assert score("gpqa", "the answer is A", answer, metadata)["reward"] == 0


@each(
    ("answer", "metadata", "message"),
    [
        ("", {}, "needs a letter, an index or a text"),
        ("", {"choices": ["x", "y"]}, "none of metadata.choices"),
        ("z", {"choices": ["x", "y"]}, "the letters to choose from are AB"),
        ("zz", {"choices": ["x", "y"]}, "none of metadata.choices"),
        ("2", {"choices": ["x", "y"]}, "must be from 0 to 1"),
        ("I", {}, "the letters to choose from are ABCDEFGH"),
    ],
)
def test_gpqa_refuses_what_is_no_right_letter(answer, metadata, message):
    with pytest.raises(ValueError, match=message):
        score("gpqa", "the answer is A", answer, metadata)


def test_gpqa_without_letters_looks_for_the_text():
    assert score("gpqa", "It is Green tea, I think", "green tea")["reward"] == 1
    assert score("gpqa", "It is evergreen teapots", "green tea")["reward"] == 0


@each(
    ("response", "chosen"),
    [
        ("B", "B"),
        ("(b).", "B"),
        ("b", "B"),
        ("I", "I"),
        ("<answer>B</answer>", "B"),
        ("<ANSWER> (B) </ANSWER>", "B"),
        ("<answer>A</answer> no, <answer> (B) </answer>", "B"),
        ("<answer>maybe B</answer> the answer is B", None),
        ("<answer></answer>", None),
        ("<answer>A, B</answer>", None),
        ("<answer>B", None),
        # stated
        ("A good question. The answer is B", "B"),
        ("The answer is: B", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **(B)**", "B"),
        ("ANSWER = B", "B"),
        ("answer: b) Paris", "B"),
        ("The answer is b.", "B"),
        ("The answer is (a), because it floats", "A"),
        ("The answer is A", "A"),
        ("The answer is A because B is false", "A"),
        ("The answer is B because A is false", "B"),
        ("The answer is I.", "I"),
        (r"The answer is $\boxed{\text{B}}$", "B"),
        ("The answer is **A**\n\nIndeed.", "A"),
        ("The answer is A. No: Answer: **B**", "B"),
        ("The answer is B. I hope that this answer is a good one", "B"),
        # words, and other things that are no letter of a choice
        ("The answer is a matter of B", None),
        ("The answer is A matter of taste", None),
        ("The answer is I think B", None),
        ("The answer is a 5", None),
        ("Answer: I'm not sure", None),
        ("The answer is Bonn", None),
        ("The answer is B-flat", None),
        ("The answer is C++", None),
        ("The answer is 5", None),
        ("The best choice is B", None),
        # two answers
        ("The answer is A or B", None),
        ("The answer is (A) or (B)", None),
        ("The answer is A/B", None),
        ("The answer is A and B.", None),
        ("The answer is B and A is wrong", "B"),
        ("The answer is B. Then the answer is A or B", None),
        # unicode
        ("Réponse: the answer is B – évidemment", "B"),
        ("The answer is “B”", "B"),
        ("The answer is ‘A’, of course", "A"),
        ("The answer is Bö", None),
        ("The answer is В", None),  # a Cyrillic letter
        ("The answer is \u212a", None),  # the sign of kelvin, which is a K without case
        ("Ｂ", None),
        # long, and made to hang
        ("", None),
        (LONG, None),
        (LONG + "The answer is B", "B"),
        ("The answer is B. " + LONG, "B"),
        ("The answer is" + " " * 100_000, None),
        ("answer " * 15_000, None),
        ("answer is " + "(" * 100_000, None),
        ("<answer>" * 12_000, None),
        ("<answer>A</answer>" * 6000 + "<answer>B</answer>", "B"),
    ],
)
def test_multiple_choice(response, chosen):
    for right in "ABI":
        for answer in (right, right.lower(), f"<answer>{right}</answer>"):
            assert score("multiple_choice", response, answer) == {
                "reward": chosen == right,
                "accuracy": chosen == right,
                "format": chosen is not None,
            }


@each("answer", ["", "none here either", "AB", "<answer></answer>", "5", "Ж"])
def test_multiple_choice_does_not_take_two_absent_letters_for_equal(answer):
    with pytest.raises(ValueError, match="needs a letter"):
        score("multiple_choice", "no tags here", answer)
