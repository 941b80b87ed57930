"""Feeding a tracker of one's own from a run's files: what it gets after rewinds, evaluations, errors and restarts."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from relaxd.config.operation import TrackingConfig
from relaxd.run_folder import METRICS, SAMPLES
from relaxd.trackers.feed import Feed, FollowedFile, split_line
from relaxd.trackers.tracker import REDACTED, Edition, TrackedRun, Tracker, redact
from tests.kit.waiting import wait_until

CALLS: list[tuple[Any, ...]] = []
FAIL_AT: set[int] = set()


class Recorder(Tracker):
    """Keeps what it is told in CALLS; fails once at the steps of FAIL_AT."""

    def start(self, run: TrackedRun, edition: Edition) -> None:
        CALLS.append(("start", "resumed" if edition.resumed else "new", bool(edition.replaced)))

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        if step in FAIL_AT:
            FAIL_AT.remove(step)
            raise OSError("the server is gone")
        CALLS.append(("step", step, dict(numbers)))

    def log_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        CALLS.append(("evaluation", step, dict(numbers)))

    def log_samples(self, step: int, rows: Any) -> None:
        CALLS.append(("samples", step, [row["text"] for row in rows]))

    def close(self, *, ended: bool) -> None:
        CALLS.append(("close", ended))


NAME = "tests.unit.trackers.test_feed:Recorder"


class Follower:
    """A feed of the recorder, and the files that it follows."""

    def __init__(self, folder: Path) -> None:
        settings = TrackingConfig(trackers=(NAME,)).model_dump()
        self.run = TrackedRun("r", folder, "r", "relaxd", {}, {}, settings)
        self.folder = folder
        self.problems: list[str] = []
        self.feed: Feed | None = None

    def start(self) -> None:
        CALLS.clear()
        self.feed = Feed(NAME, self.run, self.report, restart_seconds=0.01)
        self.feed.start()

    def report(self, name: str, problem: str) -> None:
        if not self.problems or self.problems[-1] != problem:
            self.problems.append(problem)

    def stop(self) -> list[tuple[Any, ...]]:
        """End the feed; returns what the tracker was told since its start."""
        assert self.feed is not None
        self.feed.end(run_ended=True)
        self.feed.join(20)
        assert not self.feed.is_alive()
        return list(CALLS)

    def until(self, call: tuple[Any, ...]) -> None:
        wait_until(lambda: call in CALLS, f"{call}", 20, explain=lambda: f"{CALLS} {self.problems}")

    def write(self, *lines: Mapping[str, Any], name: str = METRICS) -> None:
        """Replace a file, as the coordinator does."""
        temporary = self.folder / "new"
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(temporary, self.folder / name)

    def append(self, *lines: Mapping[str, Any], name: str = METRICS) -> None:
        with (self.folder / name).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    FAIL_AT.clear()
    follower = Follower(tmp_path)
    yield follower
    if follower.feed is not None:
        follower.stop()


def line(step: int, reward: float | None = None, **more: Any) -> dict[str, Any]:
    return {"step": step, "reward": step / 10 if reward is None else reward, **more}


def step(number: int, reward: float | None = None) -> tuple[Any, ...]:
    return ("step", number, {"train/reward": number / 10 if reward is None else reward})


def test_steps_are_logged_once_as_they_come(follower: Follower) -> None:
    follower.start()
    follower.write({"step": 0, "eval_reward": 0.5}, line(1))
    follower.until(step(1))
    follower.append(line(2))
    follower.until(step(2))
    evaluation = ("evaluation", 0, {"eval/reward": 0.5})
    assert follower.stop() == [("start", "new", False), evaluation, step(1), step(2), ("close", True)]


def test_what_was_written_before_the_end_is_logged(follower: Follower) -> None:
    follower.start()
    follower.write(*map(line, range(1, 500)))
    assert follower.stop()[1:-1] == [step(number) for number in range(1, 500)]


def test_an_evaluation_that_comes_late_is_logged_alone(follower: Follower) -> None:
    follower.write(line(1), line(2))
    follower.start()
    follower.until(step(2))
    follower.write(line(1, **{"eval_reward": 0.5, "eval/gsm8k/reward": 0.7}), line(2), line(3))
    evaluation = ("evaluation", 1, {"eval/reward": 0.5, "eval/gsm8k/reward": 0.7})
    follower.until(step(3))
    assert follower.stop() == [("start", "new", False), step(1), step(2), evaluation, step(3), ("close", True)]


@pytest.mark.parametrize("retrained", [[line(1), line(2, 0.9)], [line(1), line(2, 0.9), line(3, 0.9)]])
def test_steps_that_are_trained_again_begin_a_new_edition(follower: Follower, retrained: list[dict[str, Any]]) -> None:
    follower.write(line(1), line(2), line(3))
    follower.start()
    follower.until(step(3))
    follower.write(*retrained)
    follower.until(step(2, 0.9))
    follower.append(line(4))
    follower.until(step(4))
    calls = follower.stop()
    again = calls[calls.index(("start", "new", True)) + 1 :]
    assert again == [*(step(one["step"], one["reward"]) for one in retrained), step(4), ("close", True)]


def test_steps_that_are_lost_begin_a_new_edition(follower: Follower) -> None:
    follower.write(line(1), line(2), line(3))
    follower.start()
    follower.until(step(3))
    follower.write(line(1), line(2))
    follower.until(("start", "new", True))
    assert follower.stop()[-3:] == [step(1), step(2), ("close", True)]


def test_a_new_process_goes_on_after_the_last_step(follower: Follower) -> None:
    follower.write(line(1), line(2))
    follower.append({"step": 1, "text": "a"}, {"step": 1, "text": "b"}, name=SAMPLES)
    follower.start()
    assert ("samples", 1, ["a", "b"]) in follower.stop()
    follower.append(line(3))
    follower.append({"step": 2, "text": "c"}, name=SAMPLES)
    follower.start()
    follower.until(("samples", 2, ["c"]))
    assert follower.stop() == [("start", "resumed", False), step(3), ("samples", 2, ["c"]), ("close", True)]


def test_a_new_process_sees_that_steps_were_lost_meanwhile(follower: Follower) -> None:
    follower.write(line(1), line(2))
    follower.start()
    follower.stop()
    follower.write(line(1))
    follower.start()
    follower.until(("start", "new", True))
    assert follower.stop()[-2:] == [step(1), ("close", True)]


def test_a_tracker_that_fails_is_started_again_and_misses_nothing(follower: Follower) -> None:
    FAIL_AT.add(2)
    follower.write(line(1))
    follower.start()
    follower.until(step(1))
    follower.append(line(2), line(3))
    follower.until(step(3))
    calls = follower.stop()
    assert calls[2:] == [("close", False), ("start", "resumed", False), step(2), step(3), ("close", True)]
    text = "OSError: the server is gone (test_feed.py:"
    assert [problem[: len(text)] for problem in follower.problems if problem] == [text]
    assert follower.problems[-1] == ""


def test_a_tracker_that_hangs_is_reported_until_it_answers(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaxd.trackers.feed.SLOW_SECONDS", 0.0)
    answer = threading.Event()
    monkeypatch.setattr(Recorder, "flush", lambda self: answer.wait(60))
    follower.write(line(1))
    follower.start()
    follower.until(step(1))
    assert follower.feed is not None
    follower.feed.check()
    assert follower.problems == ["has not answered for more than 0 s"]
    answer.set()
    wait_until(lambda: follower.problems[-1] == "", "the end of the problem", 20)


def test_a_followed_file_yields_whole_lines_and_begins_again_when_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = FollowedFile(path)
    assert file.read() == (False, [])
    path.write_bytes(b'{"a": 1}\nno json\n{"a": 2')
    assert file.read() == (True, [{"a": 1}])
    with path.open("ab") as more:
        more.write(b'2}\n{"a": 3}\n')
    assert file.read() == (False, [{"a": 22}, {"a": 3}])
    os.truncate(path, 9)
    with path.open("ab") as more:  # longer than before
        more.write(b'{"a": 4444444444444444444444444444444444444444}\n')
    again, lines = file.read()
    assert again
    assert [one["a"] for one in lines] == [1, int("4" * 40)]
    file.close()


def test_numbers_of_a_line_are_split_and_named() -> None:
    given = {"step": 3, "loss": 1, "nan": None, "ok": True, "replicas": {"busy": {"r-0": 0.5}}, "eval_reward": 1.0}
    assert split_line(given) == ({"train/loss": 1, "train/replicas.busy.r-0": 0.5}, {"eval/reward": 1.0})
    assert split_line({"step": 1, "inf": float("inf")}) == ({}, {})


SECRETS: list[tuple[Callable[[], Any], Any]] = [
    (
        lambda: {"api_key": "x", "max_new_tokens": 3, "token": ""},
        {"api_key": REDACTED, "max_new_tokens": 3, "token": ""},
    ),
    (lambda: {"reward": {"headers": {"Authorization": "x"}}}, {"reward": {"headers": {"Authorization": REDACTED}}}),
    (lambda: {"X-Api-Key": "x", "hf_token": "y"}, {"X-Api-Key": REDACTED, "hf_token": REDACTED}),
    (lambda: ["redis://me:pw@host:1/0", "http://host"], [f"redis://{REDACTED}@host:1/0", "http://host"]),
    (lambda: {"privileged_key": "hint", "secret": ["a"]}, {"privileged_key": "hint", "secret": [REDACTED]}),
]


@pytest.mark.parametrize(("given", "shown"), SECRETS)
def test_secrets_are_redacted(given: Callable[[], Any], shown: Any) -> None:
    assert redact(given()) == shown
