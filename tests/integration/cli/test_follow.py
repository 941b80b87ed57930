"""Following a run: how patient the command is, and what it says meanwhile, against a real server."""

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relaxd.cli import follow as following
from relaxd.cli.execute import unfinished
from relaxd.cli.follow import Quiet, RunPaused, follow
from relaxd.client.coordinator import CoordinatorClient
from relaxd.client.errors import CliError
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import coordinator_pb2_grpc
from relaxd.v1.health_pb2 import HEALTH_STATE_REBUILDING
from tests.kit.server_thread import serve_in_thread

MINUTE = 60.0


class Answers(coordinator_pb2_grpc.CoordinatorServicer):
    """Shows one run, ten times a second."""

    def __init__(self) -> None:
        self.run = pb.Run(run_id="r", state=pb.RUN_STATE_RUNNING, reason="waiting for rollout", step=3, steps=9)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self.run)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        while True:
            yield pb.WatchRunResponse(run=self.run)
            await asyncio.sleep(0.1)


class Kit:
    """A coordinator in a thread, and a console."""

    def __init__(self, port: int, answers: Answers) -> None:
        self.port, self.run = port, answers.run
        self.console = Console(file=io.StringIO(), width=200)

    def follow(self, **options: Any) -> None:
        with CoordinatorClient(f"127.0.0.1:{self.port}") as coordinator:
            follow(coordinator, "r", self.console, **options)

    @property
    def output(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()

    def end_run_when(self, condition: Callable[[], object]) -> Callable[[], None]:
        """For `healthy`: the run is stopped as soon as something is so."""

        def look() -> None:
            if condition():
                self.run.state = pb.RUN_STATE_STOPPED

        return look


@pytest.fixture
def kit() -> Iterator[Kit]:
    with serving(Answers()) as kit:
        yield kit


@contextmanager
def serving(answers: Answers) -> Iterator[Kit]:
    add = coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    with serve_in_thread([(add, answers, "relaxd.v1.Coordinator")]) as port:
        yield Kit(port, answers)


def test_a_run_in_which_nothing_changes_is_followed_and_said_so(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "QUIET_SECONDS", 0.3)
    said = re.compile(r"nothing has changed in run r for \d+ min: waiting for rollout")
    kit.follow(healthy=kit.end_run_when(lambda: len(said.findall(kit.output)) >= 3))
    assert "run r is stopped" in kit.output


def test_it_is_said_every_ten_minutes_with_the_reason() -> None:
    run = pb.Run(run_id="r", state=pb.RUN_STATE_RUNNING, step=3, steps=9)
    quiet = Quiet(0.0)
    assert [quiet.observe(run, minute * MINUTE) for minute in range(10)] == [""] * 10
    assert quiet.observe(run, 10 * MINUTE) == "nothing has changed in run r for 10 min: step 4 of 9 is in progress"
    assert quiet.observe(run, 19 * MINUTE) == ""
    run.reason = "waiting for trainer"  # that is news
    assert quiet.observe(run, 20 * MINUTE) == ""
    assert quiet.observe(run, 30 * MINUTE) == "nothing has changed in run r for 10 min: waiting for trainer"
    assert quiet.observe(run, 40 * MINUTE) == "nothing has changed in run r for 20 min: waiting for trainer"
    assert quiet.observe_silence(51 * MINUTE) == ("no news of the run for 31 min: the coordinator does not answer")


def test_a_paused_run_is_waited_for_only_as_long_as_one_says(kit: Kit) -> None:
    kit.run.state, kit.run.reason = pb.RUN_STATE_PAUSED, "for lunch"
    with pytest.raises(RunPaused, match="run r has been paused for 0 s: for lunch"):
        kit.follow(max_pause=0.3)
    assert kit.output.count("relaxd resume r continues it, relaxd stop r ends it") == 1


def test_a_terminal_gets_a_screen_of_its_own_and_keeps_the_last_picture(kit: Kit) -> None:
    kit.console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    kit.follow(healthy=kit.end_run_when(lambda: "step 3/9" in kit.output))
    live, left = kit.output.split("\x1b[?1049l")
    assert "\x1b[?1049h" in live
    assert re.sub("\x1b.*?[a-zA-Z]", "", left).split()[:7] == [
        "relaxd",
        "run",
        "r",
        "stopped",
        "step",
        "3/9",
        "waiting",
    ]
    assert not set(kit.output) & set("╭╮╰╯│")


def test_a_rebuild_is_no_pause(kit: Kit) -> None:
    kit.run.state = pb.RUN_STATE_PAUSED
    kit.run.health.add(state=HEALTH_STATE_REBUILDING)
    seen: list[None] = []
    kit.follow(max_pause=0.3, healthy=kit.end_run_when(lambda: seen.append(None) or len(seen) > 10))


def test_a_run_that_failed_is_an_error(kit: Kit) -> None:
    kit.run.state, kit.run.reason = pb.RUN_STATE_FAILED, "no disk"
    with pytest.raises(CliError, match="run r failed: no disk"):
        kit.follow()


@pytest.mark.parametrize(
    ("phase", "summary", "expected"),
    [("RUNNING", False, True), ("STOPPING", True, True), ("STOPPED", False, True), ("STOPPED", True, False),
     ("FAILED", True, False), ("broken", False, True)],
)  # fmt: skip
def test_a_run_is_finished_when_it_has_ended_and_its_results_are_there(
    phase: str, summary: bool, expected: bool, tmp_path: Path
) -> None:
    assert not unfinished(tmp_path)  # it has not begun
    (tmp_path / "run.json").write_text("{" if phase == "broken" else json.dumps({"phase": phase}))
    if summary:
        (tmp_path / "summary.json").write_text("{}")
    assert unfinished(tmp_path) is expected
