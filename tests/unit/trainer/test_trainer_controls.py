"""Requests to the training thread: each gets an answer, and one that nobody waits for any more is not begun."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relaxd.rpc.errors import DeadlineExceeded, Unavailable
from services.trainer.loop.thread_requests import RequestQueue
from tests.kit.waiting import wait_until

TRAINING: Any = object()


def test_an_action_runs_in_the_training_thread() -> None:
    requests, here = RequestQueue(), threading.current_thread()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(requests.ask, lambda training: (training, threading.current_thread()), 30.0)

        def served() -> bool:
            requests.run(TRAINING)
            return asked.done()

        wait_until(served)
    assert asked.result(0) == (TRAINING, here)


def test_a_failure_reaches_both_threads() -> None:
    requests = RequestQueue()

    def fail(training: Any) -> None:
        raise ValueError("full")

    def failed() -> bool:
        try:
            requests.run(TRAINING)
        except ValueError:
            return True
        return False

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(requests.ask, fail, 30.0)
        wait_until(failed)
        with pytest.raises(Unavailable, match="ValueError: full"):
            asked.result(30.0)


def test_what_came_too_late_is_not_begun() -> None:
    requests = RequestQueue()
    begun: list[Any] = []
    with pytest.raises(DeadlineExceeded, match=r"within 0.01 s"):
        requests.ask(begun.append, 0.01)
    requests.run(TRAINING)
    assert not begun
