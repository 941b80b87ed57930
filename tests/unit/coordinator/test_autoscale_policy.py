"""The autoscaler's policy: single decisions as a table, and a run with a clock that only the model has."""

from collections.abc import Callable
from typing import Any

import pytest

from relaxd.config.role_settings import AutoscaleConfig
from services.coordinator.scaling.autoscale_policy import AutoscalePolicy, Sample, Verdict
from tests.kit.fluid_run import FluidRun, Load

CHANGE = 1800
"""Second at which the load changes."""
STARVED: dict[str, Any] = {"busy": 1.0, "lacking": True, "waiting": 5, "gate": ""}
AHEAD: dict[str, Any] = {"busy": 0.3, "lacking": False, "waiting": 0, "gate": ""}


def observe(policy: AutoscalePolicy, seconds: range, **values: Any) -> Verdict:
    """Let the policy see the same at each of some seconds; returns its last verdict."""
    verdict = None
    for second in seconds:
        usual = {"replicas": 4, "removable": 4, "tokens_per_second": 100.0}
        verdict = policy.observe(Sample(at=float(second), **{**usual, **values}))
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("seconds", "values", "wanted", "reason"),
    [
        pytest.param(31, STARVED, 8, "the trainer waits for busy engines 100%", id="starved: four more at once"),
        pytest.param(20, STARVED, 4, "watched for less than 30 s", id="starved for too short a time"),
        pytest.param(31, STARVED | {"waiting": 0}, 4, "with groups waiting", id="no group waits for an engine"),
        pytest.param(31, STARVED | {"busy": 0.5}, 4, "engines busy", id="engines are idle themselves"),
        pytest.param(31, STARVED | {"gate": "memory"}, 4, "gate shut for all", id="Redis is the limit"),
        pytest.param(31, STARVED | {"replicas": 6}, 7, "", id="no more than max_replicas"),
        pytest.param(31, STARVED | {"replicas": 7}, 7, "autoscale.max_replicas is 7", id="at max_replicas"),
        pytest.param(31, STARVED | {"hold": "the run is paused"}, 4, "the run is paused", id="held"),
        pytest.param(121, AHEAD, 3, "40% busy with one less", id="engines are idle: one less"),
        pytest.param(60, AHEAD, 4, "in: watched for less than 120 s", id="idle for too short a time"),
        pytest.param(121, AHEAD | {"busy": 0.5}, 4, "engines busy with one less", id="the others would be too busy"),
        pytest.param(121, AHEAD | {"busy": 0.6, "gate": "staleness"}, 3, "80%", id="so far ahead that the gate shuts"),
        pytest.param(121, AHEAD | {"lacking": True}, 3, "40% busy", id="the trainer waits for rewards"),
        pytest.param(121, STARVED | {"waiting": 0}, 4, "engines busy with one less", id="it waits for engines"),
        pytest.param(121, AHEAD | {"removable": 0}, 4, "none was scaled out", id="only initial replicas"),
        pytest.param(121, AHEAD | {"busy": 0.2, "replicas": 2}, 2, "autoscale.min_replicas is 2", id="at min_replicas"),
        pytest.param(1, STARVED | {"replicas": 1}, 2, "autoscale.min_replicas is 2", id="below min_replicas"),
        pytest.param(121, AHEAD | {"busy": None}, 4, "no engine says", id="engines that say nothing"),
    ],
)
def test_a_decision_has_its_reason(seconds: int, values: dict[str, Any], wanted: int, reason: str) -> None:
    settings = AutoscaleConfig(mode="on", min_replicas=2, max_replicas=8 if values.get("replicas", 4) < 6 else 7)
    verdict = observe(AutoscalePolicy(settings), range(seconds), **values)
    assert (verdict.wanted, reason in verdict.reason) == (wanted, True), verdict


def test_a_change_is_followed_by_a_cooldown_and_by_a_new_window() -> None:
    policy = AutoscalePolicy(AutoscaleConfig(mode="dry_run"))
    policy.acted(observe(policy, range(31), **STARVED))
    assert "less than 30 s" in observe(policy, range(31, 60), **STARVED).reason
    assert "a short time ago" in observe(policy, range(60, 85), **STARVED).reason
    assert observe(policy, range(85, 95), **STARVED).wanted == 8

    policy = AutoscalePolicy(AutoscaleConfig(mode="dry_run"))
    policy.acted(observe(policy, range(121), **AHEAD))
    assert observe(policy, range(121, 420), **AHEAD).wanted == 4
    assert observe(policy, range(420, 422), **AHEAD).wanted == 3


def test_a_gap_or_a_pause_begins_the_window_anew() -> None:
    for pause in (range(25, 26), range(0)):
        policy = AutoscalePolicy(AutoscaleConfig(mode="on"))
        observe(policy, range(25), **STARVED)
        if pause:
            observe(policy, pause, **STARVED, hold="the run is paused")
        assert observe(policy, range(40, 60), **STARVED).wanted == 4
        assert observe(policy, range(60, 71), **STARVED).wanted == 8


def test_replicas_that_bring_nothing_are_followed_by_no_others_for_ten_minutes() -> None:
    for speed, wanted in ((104.0, 8), (150.0, 12)):  # twice the replicas should bring 100 more
        policy = AutoscalePolicy(AutoscaleConfig(mode="on", max_replicas=32))
        policy.acted(observe(policy, range(31), **STARVED))
        verdict = observe(policy, range(100, 200), **STARVED, replicas=8, tokens_per_second=speed)
        assert verdict.wanted == wanted, verdict
        assert ("brought too little" in verdict.reason) == (wanted == 8)


def test_replicas_whose_load_goes_away_are_followed_by_others_when_it_is_back() -> None:
    policy = AutoscalePolicy(AutoscaleConfig(mode="on", max_replicas=32))
    policy.acted(observe(policy, range(31), **STARVED))
    observe(policy, range(40, 80), busy=0.7, lacking=False, waiting=0, gate="", replicas=8, tokens_per_second=104.0)
    assert observe(policy, range(80, 140), **STARVED, replicas=8, tokens_per_second=150.0).wanted == 12


@pytest.mark.parametrize(
    ("start", "load", "ends", "decisions"),
    [
        pytest.param(2, lambda t: Load(), (10, 11), 5, id="needs 10 engines, begins with 2"),
        pytest.param(16, lambda t: Load(), (10, 12), 6, id="needs 10, begins with 16"),
        pytest.param(10, lambda t: Load(0.1 if t < CHANGE else 0.05), (20, 22), 6, id="answers get twice as long"),
        pytest.param(10, lambda t: Load(0.1, 60 if t < CHANGE else 120), (5, 6), 6, id="training gets half as fast"),
    ],
)
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_the_number_of_engines_follows_the_load(
    start: int, load: Callable[[float], Load], ends: tuple[int, int], decisions: int, noise: float
) -> None:
    result = FluidRun(start, load, noise=noise).run(4 * CHANGE)
    assert ends[0] <= result.engines <= ends[1], result.decisions
    assert len(result.decisions) <= decisions, result.decisions
