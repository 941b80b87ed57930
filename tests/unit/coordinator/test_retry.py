"""RedisRetry repeats an operation only while Redis is away."""

import logging

import pytest

from relaxd.board import BoardUnavailable
from services.coordinator.state import retry
from services.coordinator.state.retry import WARN_EVERY, RedisRetry
from services.coordinator.state.store import StoreUnavailable, Superseded


class Outage:
    """Raises the given errors, then returns its argument."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, value: int) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return value


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.0)


async def test_an_outage_is_retried_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(BoardUnavailable("it is loading"), *(StoreUnavailable("no answer") for _ in range(WARN_EVERY)))
    with caplog.at_level(logging.WARNING):
        assert await RedisRetry("run r").in_thread(outage, 7) == 7
    assert caplog.messages == ["run r waits for Redis: it is loading", "run r waits for Redis: no answer"]


async def test_coroutine_functions_are_retried_too() -> None:
    outage = Outage(StoreUnavailable("no answer"))

    async def operation(value: int) -> int:
        return outage(value)

    assert await RedisRetry("run r").call(operation, 7) == 7


async def test_other_errors_are_raised_at_once() -> None:
    outage = Outage(Superseded("another one"), StoreUnavailable("no answer"))
    with pytest.raises(Superseded):
        await RedisRetry("run r").in_thread(outage, 7)
    assert len(outage.errors) == 1
