"""An engine's time: busy, paused or idle, and nothing counted twice."""

import pytest

from services.rollout.service.group_generator import Occupancy


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_counted_once_and_as_what_it_was() -> None:
    clock = Clock()
    occupancy = Occupancy(clock)
    clock.now += 1  # idle
    with occupancy.working():
        clock.now += 2
        with occupancy.working():  # a second request at the same time
            clock.now += 3
            assert occupancy.gauges() == {
                "engine_busy_seconds": 5.0,
                "engine_paused_seconds": 0.0,
                "engine_state": 1.0,
            }
            occupancy.pause(lease_seconds=10)
            clock.now += 0.5
            assert occupancy.gauges()["engine_state"] == 2.0
        clock.now += 0.5
        occupancy.resume()
        clock.now += 4
    clock.now += 7  # idle
    assert occupancy.gauges() == {"engine_busy_seconds": 9.0, "engine_paused_seconds": 1.0, "engine_state": 0.0}


def test_a_pause_ends_with_its_lease() -> None:
    clock = Clock()
    occupancy = Occupancy(clock)
    assert not occupancy.is_paused
    occupancy.pause(lease_seconds=2)
    assert occupancy.is_paused
    with occupancy.working():
        clock.now += 5
    assert not occupancy.is_paused
    assert occupancy.gauges() == {"engine_busy_seconds": 3.0, "engine_paused_seconds": 2.0, "engine_state": 0.0}


def test_a_pause_without_requests_is_a_pause_and_one_that_is_repeated_counts_once() -> None:
    clock = Clock()
    occupancy = Occupancy(clock)
    occupancy.pause(lease_seconds=2)
    clock.now += 1
    occupancy.pause(lease_seconds=2)
    clock.now += 1
    occupancy.resume()
    occupancy.resume()
    clock.now += 1
    assert occupancy.gauges()["engine_paused_seconds"] == 2.0


def test_a_request_that_fails_is_over() -> None:
    clock = Clock()
    occupancy = Occupancy(clock)

    def fail() -> None:
        with occupancy.working():
            clock.now += 1
            raise ValueError("it died")

    with pytest.raises(ValueError, match="it died"):
        fail()
    clock.now += 1
    assert occupancy.gauges()["engine_busy_seconds"] == 1.0
