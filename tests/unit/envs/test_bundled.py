"""The bundled environments, played."""

from typing import Any

import pytest

from relaxd.envs.calculator import Calculator, compute, shown
from relaxd.envs.environment import Reply, Sample, Step
from relaxd.envs.nim import Nim
from relaxd.envs.number_guessing import NumberGuessing
from tests.kit.cases import each


@each(
    ("expression", "result"),
    [
        ("(12 + 3) * 4", "60"),
        ("1 / 3", "0.333333333333"),
        ("-2 - -0.5", "-1.5"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 0", "division by zero"),
        ("__import__('os')", "only numbers"),
        ("2 ** 99999999", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("True + 1", "only numbers"),
        ("(" * 150, "no expression"),
        ("1e400 + 1", "only numbers"),
        ("1" * 201, "at most 200"),
        ("", "no expression"),
    ],
)
def test_the_calculator_computes_arithmetic_and_nothing_else(expression: str, result: str) -> None:
    try:
        answer = shown(compute(expression))
    except ValueError as error:
        answer = str(error)
    assert result in answer


@pytest.mark.parametrize(
    ("text", "reward"),
    [("It is 1,234.50.", 1.0), ("1234.5", 1.0), ("12 or 1235", 0.0), ("no idea", 0.0), ("9" * 5000, 0.0)],
)
def test_the_calculator_pays_for_the_last_number(text: str, reward: float) -> None:
    game = Calculator()
    game.open(Sample([], "1234.5"))
    assert game.step(Reply(text)).reward == reward


def test_the_number_is_found_by_halving_and_the_same_for_one_seed() -> None:
    for seed in range(20):
        game, low, high = NumberGuessing(), 1, 100
        assert game.open(Sample([], seed=seed)) == "I think of a number from 1 to 100. You have 7 guesses."
        for _ in range(7):
            middle = (low + high) // 2
            step = game.step(Reply(f"Between {low} and {high}: {middle}"))
            if step.done:
                break
            low, high = (middle + 1, high) if "higher" in str(step.observation) else (low, middle - 1)
        assert step.reward == 1.0
        again = NumberGuessing()
        again.open(Sample([], seed=seed))
        assert again.step(Reply(str(middle))).reward == 1.0


def test_the_game_ends_after_the_last_guess_and_refuses_bad_settings() -> None:
    game = NumberGuessing(low=5, high=5, max_guesses=2)
    game.open(Sample([]))
    assert game.step(Reply("9" * 5000)).observation == "Guess a number."
    last = game.step(Reply("6"))
    assert last == Step(None, 0.0, True, {"guesses": 2.0})
    with pytest.raises(ValueError, match="low is 3, high 2 and max_guesses 7: low <= high, and max_guesses >= 1"):
        NumberGuessing(low=3, high=2)


def play(game: Nim, stones: int, *moves: str) -> Step:
    assert game.open(Sample([], metadata={"stones": stones})) == f"{stones} stones. Take 1 to {min(3, stones)}."
    return [game.step(Reply(move)) for move in moves][-1]


@each(
    ("opponent", "stones", "moves", "step"),
    [
        ("self", 7, ["3"], Step("4 stones. Take 1 to 3.", player=1)),
        ("self", 7, ["3", "I take 2"], Step("2 stones. Take 1 to 2.", player=0)),
        ("self", 3, ["3"], Step(None, 1.0, True, {"moves": 1.0, "bad_moves": 0.0}, rewards={1: 0.0})),
        ("self", 4, ["3", "1"], Step(None, 1.0, True, {"moves": 2.0, "bad_moves": 0.0}, rewards={0: 0.0})),
        ("self", 2, ["3"], Step(None, 0.0, True, {"moves": 1.0, "bad_moves": 1.0}, rewards={1: 1.0})),
        ("self", 5, ["1", "no"], Step(None, 0.0, True, {"moves": 2.0, "bad_moves": 1.0}, rewards={0: 1.0})),
        ("best", 7, ["1"], Step("4 stones. Take 1 to 3.")),
        ("best", 4, ["1"], Step(None, 0.0, True, {"moves": 2.0, "bad_moves": 0.0})),
        ("best", 1, ["1"], Step(None, 1.0, True, {"moves": 1.0, "bad_moves": 0.0})),
    ],
)
def test_nim_is_won_by_the_last_stone(opponent: Any, stones: int, moves: list[str], step: Step) -> None:
    assert play(Nim(opponent=opponent), stones, *moves) == step


def test_nim_refuses_what_is_no_game() -> None:
    for seed in range(20):
        assert Nim(max_stones=4).open(Sample([], seed=seed)) == Nim(max_stones=4).open(Sample([], seed=seed))
    with pytest.raises(ValueError, match=r"opponent is 'me': it must be one of self, random, best"):
        Nim(opponent="me")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_stones is 0 and max_take 3"):
        Nim(max_stones=0)
    with pytest.raises(ValueError, match=r"stones is 13: it must be 1 to 12 \(max_stones\)"):
        Nim().open(Sample([], metadata={"stones": 13}))
