"""The bundled environments, played."""

import pytest

from relaxd.envs.calculator import Calculator, compute, shown
from relaxd.envs.environment import Reply, Sample


@pytest.mark.parametrize(
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
