# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The reward "reasoning_gym" as a table: right and wrong answers to items of its tasks, and answers that are code."""

from functools import cache

import pytest

from relaxd.data.sources.reasoning_gym_source import KEY, make_task
from relaxd.rewards.hub.reasoning_gym import readable
from tests.kit.cases import each
from tests.unit.rewards.scoring import LONG, score

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning")

# What the items of seed 1 ask, and their answers.
ASKED = {
    "chain_sum": ("4 - 1 - 7 =", "-4"),
    "decimal_chain_sum": ("4.4439 + 1.2537 - 7.8993 =", "-2.2017"),
    "fraction_simplification": ("Simplify the fraction 13524/57134", "138/583"),
    "spell_backward": ("ammonia", "ainomma"),
    "word_sorting": ("Only, federal, ambassador", "thought, sentence, federal, ambassador, Only"),
    "countdown": ("Do not include any other text", "94*4 - 61 - 6"),  # = 309
    "puzzle24": ("24", "10*(8 - 5) - 6"),
    "simple_integration": ("sin(X)", "-34*x**8/15 - 5*x/4 + C"),
    "coin_flip": ("exactly 2 heads in 5 fair coin flips", "0.3125"),
    "string_insertion": ("EACADDDDB", "EACADDDDB"),
    "spiral_matrix": ("4 6 7 3", "4 6 7 3 9 1 9 7 0 6 7 0 7 6 1 1"),
    "prime_factorization": ("139", "139"),
}


@cache
def item(task: str) -> dict:
    return make_task(task, {}, 3, 1)[0]


def scored(task: str, response: str) -> dict[str, float]:
    metadata = {KEY: {"task": task, "settings": {}, "size": 3, "seed": 1, "index": 0}}
    score("reasoning_gym", "", item(task)["answer"], metadata)  # makes the item, which may take long
    return score("reasoning_gym", response, item(task)["answer"], metadata)


@each(
    ("task", "response", "reward"),
    [
        ("chain_sum", "-4", 1),
        ("chain_sum", "4", 0),
        ("chain_sum", "", 0),
        ("chain_sum", "<answer>-4</answer>", 1),
        ("chain_sum", "<answer>4</answer> no: <answer> -4 </answer>", 1),
        ("chain_sum", "<answer>-4</answer> no: <answer>4</answer>", 0),
        ("chain_sum", "<think>4</think><answer>-4</answer>", 1),
        ("decimal_chain_sum", "-2.2017", 1),
        ("decimal_chain_sum", "2.2017", 0),
        ("fraction_simplification", "138/583", 1),
        ("fraction_simplification", "<answer>one half</answer>", 0.01),
        ("spell_backward", "ainomma", 1),
        ("word_sorting", "thought, sentence, federal, ambassador, Only", 1),
        ("prime_factorization", "139", 1),
        ("prime_factorization", "none", 0),
        ("coin_flip", "0.3125", 1),
        ("coin_flip", "5/16", 1),
        ("coin_flip", "half", 0),
        # formulas
        ("countdown", "94*4 - 61 - 6", 1),
        ("countdown", "4*94 - (6 + 61)", 1),
        ("countdown", "<answer>(94 * 4) - 61 - 6</answer>", 1),
        ("countdown", "94*4 - 61 + 6", 0.05),  # the numbers are right
        ("countdown", "309", 0.05),
        ("countdown", "none", 0.01),
        ("puzzle24", "10*(8 - 5) - 6", 1),
        ("puzzle24", "10 + 8 + 5 + 6", 0.01),
        ("simple_integration", "-34*x**8/15 - 5*x/4 + C", 1),
        ("simple_integration", "C - 5*x/4 - 34*x**8/15", 1),
        ("simple_integration", "-34*x**8/15 + C", 0),
        ("simple_integration", "Integral(-272*x**7/15 - 5/4, x)", 0),
        # lists
        ("string_insertion", "EACADDDDB", 1),
        ("string_insertion", "['E', 'A', 'C', 'A', 'D', 'D', 'D', 'D', 'B']", 0.1),
        ("spiral_matrix", "4 6 7 3 9 1 9 7 0 6 7 0 7 6 1 1", 1),
        ("spiral_matrix", "[4, 6, 7, 3, 9, 1, 9, 7, 0, 6, 7, 0, 7, 6, 1, 1]", 0.1),
        # unicode
        ("chain_sum", "−4", 0),
        ("countdown", "94×4 − 61 − 6", 0.01),
        # long, and made to hang
        ("chain_sum", LONG, 0),
        ("chain_sum", LONG + "<answer>-4</answer>", 1),
        ("chain_sum", "<answer>" * 12_000, 0),
        ("countdown", "9**9**9**9", 0.01),
        ("countdown", "((9**99)**99)**99", 0.01),
        ("countdown", "factorial(10**9)", 0.01),
        ("countdown", "(" * 100_000, 0.01),
        ("simple_integration", "x**x**x**x", 0),
        ("coin_flip", "1e999999999", 0),
        ("coin_flip", "1E+99_999_999", 0),
        ("string_insertion", "[" * 100_000, 0),
    ],
)
def test_reasoning_gym(task, response, reward):
    question, answer = ASKED[task]
    assert question in item(task)["question"], "reasoning-gym is of another version"
    assert item(task)["answer"] == answer
    found = scored(task, response)
    assert (found["reward"], found["accuracy"]) == (pytest.approx(reward), reward == 1)


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "simple_integration", "string_insertion", "spiral_matrix"])
@pytest.mark.parametrize(
    "code", ["__import__('pathlib').Path(r'{path}').touch()", "[open(r'{path}', 'w')]", "print(open(r'{path}', 'w'))"]
)
def test_no_answer_is_run_as_code(task, code, tmp_path):
    path = tmp_path / "touched"
    assert scored(task, code.format(path=path))["reward"] <= 0.01
    assert not path.exists()


@each(
    "formula",
    [
        "-4*(-2*x - 8)**(3/2)/3 + C",
        "-2*x**3*cos(x) + 6*x**2*sin(x) + 12*x*cos(x) - 12*sin(x) + C",
        "exp(x)*sin(x) + exp(x)*cos(x) + C",
        "-2*X**9 + 7*X**8 - 2*X + C",
        "49*(85 - 1)/14 - 42 - 73",
        "asin(x)**2 + sqrt(1 - x**2)",
    ],
)
def test_formulas_may_be_read(formula):
    assert readable(formula, "simple_integration") == formula


def test_a_task_that_computes_for_ever_scores_nothing(monkeypatch):
    class Endless:
        def score_answer(self, answer, entry):
            while True:
                pass

    monkeypatch.setattr("relaxd.rewards.hub.reasoning_gym.CHECK_SECONDS", 0.1)
    monkeypatch.setattr("relaxd.rewards.hub.reasoning_gym._item", lambda _: (Endless(), {"answer": "-4"}))
    metadata = {KEY: {"task": "chain_sum", "settings": {}, "size": 3, "seed": 1, "index": 0}}
    assert score("reasoning_gym", "-4", "-4", metadata)["reward"] == 0
