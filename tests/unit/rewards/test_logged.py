"""Users' own numbers, from a call in a reward to the metrics of a step."""

import asyncio
from typing import Any

import numpy as np
import pytest

import relaxd
from relaxd.config.reward import RewardTerm
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.calling import call
from relaxd.rewards.logged import MAX_NAMES, MAX_STEP_NAMES, log_metric, part_metrics
from relaxd.rewards.scorers import parts_of_term
from tests.kit.cases import each

SAMPLES = [RewardInput("", "a"), RewardInput("", "bcd"), RewardInput("", "ef")]


def parts_of(reward: Any) -> list[dict[str, float]]:
    with asyncio.Runner() as runner:
        outcomes = call(reward, SAMPLES, runner)
    assert all(isinstance(outcome, RewardOutput) for outcome in outcomes), outcomes
    return [outcome.parts for outcome in outcomes if isinstance(outcome, RewardOutput)]


def plain(sample: RewardInput) -> float:
    for letter in sample.response:
        relaxd.log_metric("code", np.float32(ord(letter)))
        relaxd.log_metric("letters", 1, "sum")
        relaxd.log_metric("newest/letter", ord(letter), "last")
    return 1.0


async def awaited(sample: RewardInput) -> float:
    await asyncio.sleep(0)  # brief: a turn of the loop, so that the samples' calls are interleaved
    return await asyncio.to_thread(plain, sample)


@pytest.mark.parametrize("reward", [plain, awaited])
def test_each_sample_has_what_its_call_logged(reward: Any) -> None:
    assert parts_of(reward) == [
        {
            "log/mean/code": np.mean([ord(letter) for letter in sample.response]),
            "log/sum/letters": len(sample.response),
            "log/last/newest/letter": ord(sample.response[-1]),
        }
        for sample in SAMPLES
    ]


def test_a_group_logs_once() -> None:
    def score(samples: list[RewardInput]) -> list[float]:
        log_metric("size", len(samples), "max")
        return [0.0] * len(samples)

    assert parts_of(score) == [{"log/max/size": 3.0}, {}, {}]


def test_a_step_has_numbers_by_how_they_are_logged() -> None:
    values = [3.0, -1.0, 2.0]
    parts = {f"log/{how}/x_{how}": values for how in ("mean", "sum", "min", "max", "last")} | {"style": [1.0, 0.0]}
    assert part_metrics(parts, "reward_") == {
        "user/x_mean": pytest.approx(4 / 3),
        "user/x_sum": 4.0,
        "user/x_min": -1.0,
        "user/x_max": 3.0,
        "user/x_last": 2.0,
        "reward_style": 0.5,
    }


def test_a_step_has_a_limited_number_of_names() -> None:
    found = part_metrics({f"log/sum/n{number:04}": [1.0] for number in range(MAX_STEP_NAMES + 9)})
    assert len(found) == MAX_STEP_NAMES + 1
    assert found["user_names_left_out"] == 9.0


def test_terms_of_a_sum_log_under_one_name() -> None:
    output = RewardOutput(0.5, {"log/sum/calls": 2.0, "style": 1.0})
    assert parts_of_term(RewardTerm(name="f1"), output) == {"f1": 0.5, "log/sum/calls": 2.0, "f1_style": 1.0}


@each(
    ("arguments", "error"),
    [
        (("two words", 1), "name is 'two words'"),
        (("", 1), "name is ''"),
        (("x" * 65, 1), "1 to 64"),
        ((7, 1), "name is 7"),
        (("x", float("nan")), "value of 'x' is nan"),
        (("x", "1"), "value of 'x' is '1': it must be a finite number"),
        (("x", 1, "median"), "must be one of mean, sum, min, max, last"),
    ],
)
def test_bad_arguments_are_refused_everywhere(arguments: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        log_metric(*arguments)


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ([("x", 1, "sum"), ("x", 1, "mean")], "was 'sum'"),
        ([(f"x{number}", 1) for number in range(MAX_NAMES + 1)], "one name more than the 64"),
    ],
)
def test_what_a_call_may_not_log_fails_its_sample(calls: Any, error: str) -> None:
    def score(sample: RewardInput) -> float:
        for one in calls:
            log_metric(*one)
        return 0.0

    with asyncio.Runner() as runner:
        (outcome,) = call(score, SAMPLES[:1], runner)
    assert isinstance(outcome, ValueError)
    assert error in str(outcome)
