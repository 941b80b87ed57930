"""Number of rollout replicas during a rehearsal."""

import pytest

from relaxd.tools.rehearsal.engine_numbers import EngineNumbers
from relaxd.v1.scaling_pb2 import AutoscaleDecision, Autoscaler

OUT = AutoscaleDecision(replicas=2, wanted_replicas=4, reason="busy", request_id="auto-1")
IN = AutoscaleDecision(replicas=4, wanted_replicas=3, reason="idle")


def observed() -> EngineNumbers:
    """Return two replicas, four from 20 s on, three from 40 s on."""
    numbers = EngineNumbers([(0.0, 2)], "on")
    numbers.observe(5.0, Autoscaler(replicas=2))
    numbers.observe(15.0, Autoscaler(replicas=2, decisions=[OUT]))
    numbers.observe(20.0, Autoscaler(replicas=4, decisions=[OUT]))
    numbers.observe(40.0, Autoscaler(replicas=3, decisions=[IN, OUT]))  # the newest first
    return numbers


def test_numbers_over_time() -> None:
    numbers = observed()
    assert numbers.changes == [(0.0, 2), (20.0, 4), (40.0, 3)]
    assert (numbers.last, numbers.most) == (3, 4)


def test_the_mean_number_of_a_window() -> None:
    numbers = observed()
    assert numbers.mean(10.0, 50.0) == pytest.approx((10 * 2 + 20 * 4 + 10 * 3) / 40)
    assert numbers.mean(25.0, 35.0) == 4
    assert numbers.mean(45.0, 60.0) == 3


def test_the_row_shows_numbers_and_decisions() -> None:
    assert observed().row(10.0, 50.0) == (
        "2 for 10 s, 4 for 20 s, 3 for 10 s. Decisions: at 15 s 2 to 4: busy; at 40 s 4 to 3 (not done): idle"
    )
    assert observed().row(1.0, 10.0) == "2 for 9 s. Decisions: none"


def test_the_row_shows_the_last_decisions_of_many() -> None:
    numbers = EngineNumbers([(0.0, 2)], "dry_run")
    for second in range(12):
        numbers.observe(second, Autoscaler(replicas=2, decisions=(second + 1) * [OUT]))
    assert numbers.row(0.0, 20.0).startswith("2 for 20 s. Decisions: 2 earlier ones; at 2 s 2 to 4: busy; at 3 s")
