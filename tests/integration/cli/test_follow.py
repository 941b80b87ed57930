"""Following a run: how patient the command is, and what it says meanwhile, against a real server."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relaxd.cli.execute import unfinished
from relaxd.cli.reading import follow as following
from relaxd.cli.reading.follow import HungUp, Quiet, RunPaused, Terminated, follow, interrupt_code
from relaxd.cli.reading.status_command import print_why
from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import coordinator_pb2_grpc
from relaxd.v1.health_pb2 import HEALTH_STATE_REBUILDING
from tests.kit.processes import start_python
from tests.kit.server_thread import serve_in_thread
from tests.kit.waiting import PATIENCE


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


def test_a_run_without_news_is_spoken_of(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "QUIET_SECONDS", 0.3)
    kit.run.remaining_seconds = 300
    kit.follow(healthy=kit.end_run_when(lambda: kit.output.count("run r: waiting for rollout; about 5 min left") >= 3))
    assert "run r is stopped" in kit.output


def test_what_a_run_waits_for_is_said_at_once_and_dropped_groups_too(kit: Kit) -> None:
    kit.run.waiting_for, kit.run.wait.kind = "step 4 lacks 3 of its 16 groups, for 40 s", pb.WAIT_KIND_STAGE
    kit.run.groups.published = 100
    kit.run.groups.dropped_by_reason["zero_variance"] = 30
    seen: list[None] = []
    kit.follow(healthy=kit.end_run_when(lambda: seen.append(None) or len(seen) > 3))
    assert kit.output.count("run r: step 4 lacks 3 of its 16 groups, for 40 s") == 1
    assert kit.output.count("warning: 30% of the groups were dropped as zero_variance: all answers to a prompt") == 1


def test_a_missing_role_is_told_with_the_command_that_starts_it(kit: Kit) -> None:
    kit.run.state, kit.run.reason, kit.run.step = pb.RUN_STATE_PENDING, "waiting for teacher", 0
    kit.run.waiting_for = "no teacher replica is registered, for 1 s"
    kit.run.wait.kind, kit.run.wait.on = pb.WAIT_KIND_ROLE, "teacher"
    kit.run.wait.advice.append("relaxd scale teacher=1 starts one")
    seen: list[None] = []

    def look() -> None:
        seen.append(None)
        kit.run.waiting_for = f"no teacher replica is registered, for {len(seen)} s"
        if len(seen) > 4:
            kit.run.state = pb.RUN_STATE_STOPPED

    kit.follow(healthy=look)
    assert kit.output.count("relaxd scale teacher=1 starts one") == 1
    assert "run r: no teacher replica is registered, for 1 s: relaxd scale teacher=1 starts one" in kit.output


def test_an_alarm_is_told_once_until_it_ends_and_why_shows_it(kit: Kit) -> None:
    gap = kit.run.alarms.add(kind=pb.ALARM_KIND_LOGPROB_GAP, first_step=2, text="log-probs differ by 0.36")
    seen: list[None] = []

    def look() -> None:
        seen.append(None)
        if len(seen) == 4:
            gap.text = "log-probs differ by 0.4"
            print_why(kit.run, kit.console)
        elif len(seen) == 8:
            kit.run.ClearField("alarms")
        elif len(seen) == 12:
            kit.run.alarms.add(kind=pb.ALARM_KIND_LOGPROB_GAP, first_step=7, text="log-probs differ again")
        elif len(seen) == 16:
            kit.run.state = pb.RUN_STATE_STOPPED

    kit.follow(healthy=look)
    warnings = [line for line in kit.output.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: since step 2: log-probs differ by 0.36",
        "warning: since step 7: log-probs differ again",
    ]
    assert "alarms:\n  since step 2: log-probs differ by 0.4\n" in kit.output


def test_there_is_a_line_every_half_minute_with_the_reason() -> None:
    run = pb.Run(run_id="r", state=pb.RUN_STATE_RUNNING, step=3, steps=9)
    quiet = Quiet(0.0)
    assert [quiet.observe(run, second) for second in range(30)] == [""] * 30
    assert quiet.observe(run, 30) == "run r: step 4 of 9 is in progress"
    quiet.spoke(30)
    run.waiting_for = "the trainer works on it, for 50 s"
    assert quiet.observe(run, 59) == ""
    assert quiet.observe(run, 60) == "run r: the trainer works on it, for 50 s"
    quiet.spoke(60)
    assert quiet.observe_silence("Redis is away", 89) == ""
    silence = quiet.observe_silence("Redis is away", 190)
    assert silence == "no news of the run for 2 min: the coordinator answers nothing: Redis is away"


def test_why_says_the_sentence_the_evidence_and_what_to_do(kit: Kit) -> None:
    print_why(kit.run, kit.console)
    assert "run r (running, step 3 of 9): nothing holds it up" in kit.output
    kit.run.waiting_for = "it is paused and waits for a person: for lunch, for 3 min"
    kit.run.wait.on = "a person"
    kit.run.wait.evidence.append("rollout: 2 groups wait, 3 are held")
    kit.run.wait.advice.append("relaxd resume r continues it")
    print_why(kit.run, kit.console)
    for expected in ("for lunch, for 3 min\n", "because of a person", "  rollout: 2 groups wait", "  relaxd resume r"):
        assert expected in kit.output
    kit.run.state, kit.run.reason = pb.RUN_STATE_STOPPED, "completed"
    print_why(kit.run, kit.console)
    assert "waits for nothing: it has ended: completed" in kit.output


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_restores_the_terminal(kit: Kit, number: signal.Signals, code: int) -> None:
    kit.console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught:
        kit.follow(healthy=lambda: os.kill(os.getpid(), number))
    assert interrupt_code(caught.value) == code
    assert kit.output.count("\x1b[?1049h") == kit.output.count("\x1b[?1049l") == 1
    assert signal.getsignal(number) is before


def test_a_hang_up_is_noted_once_and_never_where_it_is_ignored(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[None] = []
    monkeypatch.setattr(following, "leave_terminal", lambda: left.append(None))  # this process keeps its terminal
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(HungUp) as caught:
            kit.follow(healthy=lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert (interrupt_code(caught.value), len(left)) == (129, 1)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        os_signals = iter((signal.SIGHUP, signal.SIGTERM))
        with pytest.raises(Terminated) as ended:
            kit.follow(healthy=lambda: os.kill(os.getpid(), next(os_signals)))
        assert (interrupt_code(ended.value), len(left)) == (143, 1)
    finally:
        signal.signal(signal.SIGHUP, before)


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


def test_a_terminal_that_is_gone_before_its_signal_is_a_hang_up(kit: Kit) -> None:
    """The error of a write says so first, and no signal at all comes where the terminal isn't the process's own."""
    terminal, its_end = os.openpty()
    process = start_python(
        *("-m", "relaxd.cli", "watch", "r", "--coordinator", f"127.0.0.1:{kit.port}"),
        environment={"TERM": "xterm-256color", "CI": ""},
        stdin=subprocess.DEVNULL,
        stdout=its_end,
        stderr=its_end,
    )
    os.close(its_end)
    output = b""
    while b"waiting for rollout" not in output:
        output += os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.wait(30 * PATIENCE) == 128 + signal.SIGHUP
