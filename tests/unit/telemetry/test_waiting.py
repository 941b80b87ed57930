"""Named waits: listed while they last, the longest first, from any thread, and logged when they last."""

import logging
import threading

import pytest

from relaxd import waiting as module
from relaxd.waiting import Wait, due_notices, duration, waiting, waits
from tests.kit.waiting import wait_until


def test_waits_are_listed_while_they_last() -> None:
    assert waits() == []
    with waiting("the weights", on="trainer-0") as outer:
        ready, done = threading.Event(), threading.Event()

        def inside() -> None:
            with waiting("Redis"):
                ready.set()
                done.wait(10)

        thread = threading.Thread(target=inside)
        thread.start()
        assert ready.wait(10)
        outer.reason = "the last weights"
        assert [str(wait) for wait in waits()] == ["the last weights (trainer-0)", "Redis"]
        outer.since -= 60
        assert [wait.on for wait in waits(min_seconds=30)] == ["trainer-0"]
        done.set()
        thread.join(10)
        assert waits() == [outer]
    with pytest.raises(ZeroDivisionError), waiting("what fails"):
        1 / 0  # noqa: B018
    assert waits() == []


def test_a_wait_that_lasts_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, logger="relaxd.waiting"), waiting("the weights") as wait:
        wait.since -= 31
        wait_until(lambda: "waiting for the weights, for 3" in caplog.text, "a line in the log", 10)


def test_notices_come_at_doubling_intervals() -> None:
    wait = Wait("the weights", on="trainer-0")
    begun, told = wait.since, []
    for second in range(0, 250, 5):
        wait.since = begun - second
        told += due_notices([wait])
    assert [line.rpartition("for ")[2] for line in told] == ["30 s now", "60 s now", "2 min now", "4 min now"]
    assert told[0].startswith("waiting for the weights (trainer-0), for 30 s")


def test_durations_are_short() -> None:
    found = [duration(seconds) for seconds in (0.4, 119, 120, 7199, 9000)]
    assert found == ["0 s", "119 s", "2 min", "120 min", "2.5 h"]
