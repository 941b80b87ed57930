# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The rewards that compare or search texts, as tables."""

import re

import pytest

from tests.kit.cases import each
from tests.unit.rewards.scoring import LONG, score


@each(
    ("response", "answer", "right"),
    [
        ("Paris", "Paris", 1),
        (" Paris\n", "Paris", 1),
        ("Paris", "\tParis ", 1),
        ("paris", "Paris", 0),
        ("Paris.", "Paris", 0),
        ("in Paris", "Paris", 0),
        ("Paris or Rome", "Paris", 0),
        ("Paris\nParis", "Paris", 0),
        ("New  York", "New York", 0),
        ("", "Paris", 0),
        (" \n", "Paris", 0),
        # numbers are texts here
        ("1/2", "1/2", 1),
        ("0.5", "1/2", 0),
        ("1,234", "1234", 0),
        ("5 cm", "5 cm", 1),
        ("5cm", "5 cm", 0),
        ("[1, 2)", "[1, 2)", 1),
        ("[1,2)", "[1, 2)", 0),
        (r"\frac{1}{2}", r"\frac{1}{2}", 1),
        (r"\boxed{5}", "5", 0),
        ("<answer>5</answer>", "5", 0),
        # unicode
        ("Zürich", "Zürich", 1),
        ("Zu\u0308rich", "Z\u00fcrich", 0),  # another way to write it is another text
        ("北京", "北京", 1),
        ("５", "5", 0),
        ("−5", "-5", 0),
        ("\u00a0Paris\u2003", "Paris", 1),
        ("Paris\u200b", "Paris", 0),
        # long
        (LONG, LONG, 1),
        (LONG + ".", LONG, 0),
        (" " * 100_000, "Paris", 0),
        (" " * 100_000 + "Paris", "Paris", 1),
    ],
)
def test_exact_match(response, answer, right):
    assert score("exact_match", response, answer) == {"reward": right}


def test_any_of_several_references_is_right():
    several = '["Paris", "the city of light"]'
    assert [score("exact_match", one, several)["reward"] for one in ("Paris", "the city of light ", "of")] == [1, 1, 0]
    assert score("exact_match", several, several) == {"reward": 1}
    # The best reference counts, and not words of several.
    assert score("f1", "red dog", '["cat", "big red dog"]') == pytest.approx(
        {"reward": 0.8, "precision": 1, "recall": 2 / 3}
    )
    assert score("f1", "red dog", '["red", "dog"]')["reward"] == pytest.approx(2 / 3)
    assert score("f1", "x", '["1", 2]')["reward"] == 0
    assert score("search_r1", "<answer>the red dog</answer>", '["cat", "red dog"]')["reward"] == 1


@pytest.mark.parametrize("answer", ["", " ", "\n\t"])
def test_exact_match_does_not_take_nothing_for_right(answer):
    with pytest.raises(ValueError, match="answer is empty"):
        score("exact_match", "", answer)


@each(
    ("response", "answer", "precision", "recall"),
    [
        # Of the reply's words "big red dog" two of three are shared, of the answer's two of two.
        ("The big, red dog!", "red dog", 2 / 3, 1),
        ("red dog", "the big red dog", 1, 2 / 3),
        ("dog dog dog", "dog", 1 / 3, 1),
        ("dog dog cat", "dog dog dog dog", 2 / 3, 2 / 4),
        ("dog", "dog", 1, 1),
        ("A dog", "the DOG.", 1, 1),
        ("cat", "dog", 0, 0),
        ("dogs", "dog", 0, 0),
        ("dog or cat", "dog", 1 / 3, 1),
        ("cat and dog", "dog and cat", 1, 1),
        ("", "dog", 0, 0),
        ("the", "dog", 0, 0),
        ("...", "dog", 0, 0),
        ("theatre", "theatre", 1, 1),
        # closed answers count as a whole
        ("Yes.", "yes", 1, 1),
        ("yes it is", "yes", 0, 0),
        ("yes", "yes it is", 0, 0),
        ("no", "No!", 1, 1),
        ("no", "yes", 0, 0),
        ("noanswer", "noanswer", 1, 1),
        ("yes", "the yes", 1, 1),
        # numbers: punctuation is dropped, as in SQuAD
        ("1,234", "1234", 1, 1),
        ("1.5", "15", 1, 1),
        ("1/2", "1/2", 1, 1),
        ("5 cm", "5", 1 / 2, 1),
        ("[1, 2)", "1 2", 1, 1),
        # unicode: only ASCII has punctuation, as in SQuAD
        ("Zürich ist schön", "ZÜRICH", 1 / 3, 1),
        ("“dog”", "dog", 0, 0),
        ("北京 dog", "北京", 1 / 2, 1),
        ("big\u00a0dog", "dog", 1 / 2, 1),
        # long
        (LONG, "it", 5000 / 25_000 / 5000, 1),
        ("dog " * 25_000, "dog", 1 / 25_000, 1),
        ("the " * 25_000, "dog", 0, 0),
        ("," * 100_000, "dog", 0, 0),
        ("d" * 100_000, "d" * 100_000, 1, 1),
    ],
)
def test_f1_counts_shared_words(response, answer, precision, recall):
    mean = 2 * precision * recall / (precision + recall) if precision else 0
    assert score("f1", response, answer) == pytest.approx({"reward": mean, "precision": precision, "recall": recall})


@pytest.mark.parametrize("answer", ["", "the", "...", " \n"])
def test_f1_needs_words(answer):
    with pytest.raises(ValueError, match="needs words"):
        score("f1", "", answer)


TARGETS = {"reward_model": {"ground_truth": {"target": ["Victor Hugo", "Hugo, Victor", "the 5"]}}}


@each(
    ("response", "accuracy", "form"),
    [
        ("<answer>Victor Hugo</answer>", 1, 1),
        ("<answer> victor hugo.</answer>", 1, 1),
        ("<answer>hugo victor</answer>", 1, 1),
        ("<answer>The Victor Hugo</answer>", 1, 1),
        ("<answer>Victor\nHugo</answer>", 1, 1),
        ("<answer>5</answer>", 1, 1),
        ("<answer>a 5!</answer>", 1, 1),
        ("<answer>Hugo</answer>", 0, 1),
        ("<answer>Victor Hugo or Zola</answer>", 0, 1),
        ("<answer>Victor-Hugo</answer>", 0, 1),
        ("<answer>VictorHugo</answer>", 0, 1),
        ("<answer>5 cm</answer>", 0, 1),
        ("<answer>5.0</answer>", 0, 1),
        ("<answer>10/2</answer>", 0, 1),
        ("<answer>[5]</answer>", 1, 1),
        (r"<answer>\boxed{5}</answer>", 0, 1),
        ("<answer>Zola</answer> no: <answer>Victor Hugo</answer>", 1, 1),
        ("<answer>Victor Hugo</answer> no: <answer>Zola</answer>", 0, 1),
        ("<think><answer>Zola</answer></think><answer>Victor Hugo</answer>", 1, 1),
        ("<search>Hugo</search><information>Victor Hugo</information>", 0, 0),
        ("Victor Hugo", 0, 0),
        ("<answer>Victor Hugo", 0, 0),
        ("<answer></answer>", 0, 1),
        ("<answer>the</answer>", 0, 1),
        ("", 0, 0),
        ("<answer>Víctor Hugo</answer>", 0, 1),
        ("<answer>Victor\u00a0Hugo</answer>", 1, 1),
        ("<answer>“Victor Hugo”</answer>", 0, 1),
        ("<answer>５</answer>", 0, 1),
        (LONG + "<answer>Victor Hugo</answer>", 1, 1),
        ("<answer>Victor Hugo</answer>" + LONG, 1, 1),
        ("<answer>" + LONG + "</answer>", 0, 1),
        ("<answer>" * 12_000, 0, 0),
    ],
)
def test_search_r1(response, accuracy, form):
    found = score("search_r1", response, metadata=TARGETS)
    assert found == {"reward": accuracy, "accuracy": accuracy, "format": form}
    alone = score("search_r1", response, "Victor Hugo")
    assert alone["format"] == form
    assert alone["accuracy"] <= accuracy


def test_search_r1_gives_a_quarter_for_many_answers_and_no_silent_zero():
    guesses = "<answer>Zola</answer>" * 9
    ten, eleven = (
        guesses + "<answer>Victor Hugo</answer>",
        guesses + "<answer>Zola</answer><answer>Victor Hugo</answer>",
    )
    assert score("search_r1", ten, metadata=TARGETS)["reward"] == 1
    assert score("search_r1", eleven, metadata=TARGETS) == {"reward": 0.25, "accuracy": 1, "format": 1}
    for truth in ({"target": []}, {"target": [None]}, {"target": ["the"]}, {}, None, ""):
        with pytest.raises(ValueError, match=re.escape(f"ground_truth, is {truth!r}: ")):
            score("search_r1", "<answer></answer>", metadata={"reward_model": {"ground_truth": truth}})


@each(
    ("response", "settings", "found"),
    [
        ("<think>a</think> b", {"pattern": r"(?s)<think>.*</think>"}, 1),
        ("<think>a b", {"pattern": r"(?s)<think>.*</think>"}, 0),
        ("a\nb", {"pattern": "a.b"}, 0),
        ("a\nb", {"pattern": "(?s)a.b"}, 1),
        ("a\nb", {"pattern": "^b$"}, 0),
        ("a\nb", {"pattern": "(?m)^b$"}, 1),
        (" 12 ", {"pattern": "[0-9]+", "full": True}, 1),
        ("12a", {"pattern": "[0-9]+", "full": True}, 0),
        ("12\n", {"pattern": "[0-9]+$", "full": True}, 1),
        ("12\n13", {"pattern": "[0-9]+$", "full": True}, 0),
        ("ab", {"pattern": "a|ab", "full": True}, 1),
        ("12a", {"pattern": "[0-9]+"}, 1),
        ("", {"pattern": "x"}, 0),
        ("", {"pattern": "^$"}, 1),
        (" \n", {"pattern": "", "full": True}, 0),  # the answer is the pattern
        ("abc", {}, 1),
        ("ABC", {}, 0),
        ("ABC", {"pattern": "(?i)b"}, 1),
        ("color", {"pattern": "colou?r"}, 1),
        ("noon", {"pattern": r"\b(\w)(\w)\2\1\b"}, 1),
        ("1/2", {"pattern": r"^\d+/\d+$"}, 1),
        ("1,234.50", {"pattern": r"\d{1,3}(,\d{3})*\.\d\d", "full": True}, 1),
        ("12,34.50", {"pattern": r"\d{1,3}(,\d{3})*\.\d\d", "full": True}, 0),
        ("5 cm", {"pattern": r"\d+\s*(cm|mm)$"}, 1),
        (r"\boxed{\boxed{5}}", {"pattern": r"\\boxed\{\d+\}"}, 1),
        ("[1, 2)", {"pattern": r"[\[(]\d+, \d+[\])]", "full": True}, 1),
        # unicode
        ("Zürich", {"pattern": r"^\w+$"}, 1),
        ("Zürich", {"pattern": r"(?a)^\w+$"}, 0),
        ("ÜBER", {"pattern": "(?i)über"}, 1),
        ("٣", {"pattern": r"\d"}, 1),
        ("😀", {"pattern": "^.$"}, 1),
        # long
        (LONG + "b", {"pattern": "b$"}, 1),
        (LONG, {"pattern": r"\bbye\b"}, 0),
        ("a" * 100_000, {"pattern": "a*", "full": True}, 1),
        ("a" * 100_000, {"pattern": "^(a+)b"}, 0),
    ],
)
def test_regex(response, settings, found):
    assert score("regex", response, "b", **settings) == {"reward": found, "too_slow": 0}


@pytest.mark.parametrize(
    ("response", "pattern"),
    [("a" * 5000 + "!", "(a|a)*$"), ("a" * 40 + "!", "(a+)+$"), ("a" * 30_000, "a*a*a*b")],
)
def test_a_regex_that_hangs_is_no_match(response, pattern, monkeypatch):
    monkeypatch.setattr("relaxd.rewards.hub.regex.MATCH_SECONDS", 0.2)
    assert score("regex", response, pattern=pattern) == {"reward": 0, "too_slow": 1}


def test_a_regex_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"is no regular expression: missing \)"):
        score("regex", "a", pattern="(")
    with pytest.raises(ValueError, match="there is no pattern"):
        score("regex", "a")
