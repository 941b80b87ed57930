"""Rules on metrics: a table of numbers and the alarms that they make."""

import math

import pytest

from relaxd.alerts.rules import RuleWatch, parse_rule
from tests.kit.cases import each

WRONG = [
    ("", "expected"),
    ("kl", "expected"),
    ("kl = 3", "expected"),
    ("kl > much", "expected"),
    ("kl > 1 over 0 steps", "steps must be 1 to 1000"),
    ("kl > 1 over 1001 steps", "steps must be 1 to 1000"),
    ("reward_mean < 0.5 x lowest", '"<" goes with "x highest"'),
    ("kl > 2 x highest", '">" goes with "x lowest"'),
    ("reward_mean < 2 x highest", "between 0 and 1"),
    ("kl > 0.5 x lowest", "above 1"),
]


@each(("rule", "text"), WRONG)
def test_wrong_rules_are_refused(rule: str, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        parse_rule(rule)


NAN = math.nan
CASES: list[tuple[str, list[float | None], list[tuple[int, int]]]] = [
    ("m > 1 over 1 step", [0, 2, 0, 3, 3], [(2, 2), (4, 5)]),
    ("m > 1 over 3 steps", [0, 9, 0, 0, 9, 9], [(6, 6)]),  # one odd step neither begins nor ends an alarm
    ("m>-1e0 over 1 steps", [-2, -0.5], [(2, 2)]),
    ("m < .1", [0, 0, 0, 0], []),  # fewer steps than are compared
    ("m < .1", [0, 0, 0, 0, 0], [(5, 5)]),
    ("m < 0.5 x highest over 1 steps", [0.2, 0.8, 0.5, 0.3, 0.5], [(4, 4)]),
    ("m < 0.5 x highest over 1 steps", [-1, -5, -9], []),  # no part of a number below 0 is a limit
    ("m > 2 x lowest over 1 steps", [4, 2, 4, 5], [(4, 4)]),
    ("m < 1 over 2 steps", [0, None, NAN, 0], [(4, 4)]),  # steps without the number don't count
]


@each(("rule", "values", "alarms"), CASES)
def test_alarms_of_a_rule(rule: str, values: list[float | None], alarms: list[tuple[int, int]]) -> None:
    lines = [{"step": step, "m": value} for step, value in enumerate(values, 1)]
    found = RuleWatch(parse_rule(rule)).observe_all(lines)
    assert [(one.first_step, one.last_step) for one in found] == alarms


def test_an_alarm_says_the_number_the_limit_and_the_rule() -> None:
    (alarm,) = RuleWatch(parse_rule("m < 0.5 x highest over 1 steps")).observe_all(
        [{"step": step, "m": value} for step, value in enumerate([0.8, 0.3, 0.1, 0.2], 1)]
    )
    assert alarm.text == "m is 0.1, below 0.4 (alerts.rules: m < 0.5 x highest over 1 steps)"


def test_steps_that_come_again_replace_their_earlier_selves() -> None:
    watch = RuleWatch(parse_rule("m < 0.5 x highest over 1 steps"))
    watch.observe_all([{"step": 1, "m": 0.4}, {"step": 2, "m": 1.0}, {"step": 3, "m": 0.4}])
    assert watch.alarm is not None
    watch.observe(2, {"m": 0.4})  # Redis lost steps 2 and 3
    assert watch.alarm is None
    watch.observe(3, {"m": 0.1})
    assert watch.alarm is not None
    assert (watch.alarm.first_step, watch.alarm.limit) == (3, 0.2)
