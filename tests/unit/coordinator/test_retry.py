"""Operations are repeated only while what they need is away, and their waits are named."""

import asyncio
import errno
import logging
import threading
from pathlib import Path

import pytest

from relaxd.board import BoardUnavailable
from relaxd.config import DataConfig
from relaxd.data.vision import PromptHostAway
from relaxd.models import DataError
from relaxd.waiting import waits
from services.coordinator.state import retries
from services.coordinator.state.retries import MEDIA_HOST, WARN_EVERY, FolderRetry, MediaHostRetry, RedisRetry
from services.coordinator.state.store import StoreUnavailable, Superseded
from tests.kit.waiting import eventually


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
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)


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


def disk_waits() -> list[str]:
    return [wait.reason for wait in waits() if wait.disk]


async def test_a_folder_that_refuses_is_waited_for_until_it_takes_the_file() -> None:
    folder, seen = FolderRetry("run r", Path("/runs/r")), []
    errors = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOSPC, "No space left on device")]

    def write() -> None:
        seen.append((folder.waiting, disk_waits()))
        if errors:
            raise errors.pop(0)

    await folder.in_thread(write)
    of = "the disk of /runs/r, for run r: "
    assert seen == [
        (False, []),
        (True, [f"{of}[Errno 24] Too many open files"]),
        (True, [f"{of}[Errno 28] No space left on device"]),
    ]
    assert (folder.waiting, disk_waits()) == (False, [])


async def test_a_folder_that_does_not_answer_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderRetry, "hung_seconds", 0.05)
    folder, answer = FolderRetry("run r", Path("/runs/r")), threading.Event()
    writing = asyncio.create_task(folder.in_thread(answer.wait, 60.0))
    await eventually(lambda: folder.waiting, "the wait")
    assert disk_waits() == ["the disk of /runs/r, for run r: no answer"]
    answer.set()
    assert await writing
    assert (folder.waiting, disk_waits()) == (False, [])


def media_retry(**settings: float) -> MediaHostRetry:
    return MediaHostRetry("run r", DataConfig(source="addition", media_hosts=("a.org", "b.org"), **settings))


async def test_a_media_host_is_waited_for_until_it_answers() -> None:
    seen: list[list[tuple[str, str]]] = []
    away = [PromptHostAway("data", "line 1: HTTP 503"), PromptHostAway("data", "line 1: HTTP 502")]

    def read() -> None:
        seen.append([(wait.reason, wait.on) for wait in waits()])
        if away:
            raise away.pop(0)

    await media_retry().in_thread(read)
    of = "a media host (a.org, b.org), for run r: data: line 1: HTTP"
    assert seen == [[], [(f"{of} 503", MEDIA_HOST)], [(f"{of} 502", MEDIA_HOST)]]
    assert waits() == []


async def test_a_media_host_that_stays_away_or_answers_wrong_is_not_waited_for() -> None:
    outage = Outage(*[PromptHostAway("data", "HTTP 503")] * 2)
    with pytest.raises(PromptHostAway):
        await media_retry(media_wait_seconds=0.0).in_thread(outage, 7)
    assert len(outage.errors) == 1
    outage = Outage(PromptHostAway("data", "HTTP 503"), DataError("data", "HTTP 404"))
    with pytest.raises(DataError, match="HTTP 404"):
        await media_retry().in_thread(outage, 7)
