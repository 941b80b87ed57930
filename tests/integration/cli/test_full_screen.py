"""The full screen of `relaxd watch`, driven by keys, on a coordinator that a real server answers for."""

import asyncio
import fcntl
import html
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import coordinator_pb2_grpc
from tests.kit.processes import kill, start_python
from tests.kit.server_thread import serve_in_thread
from tests.kit.waiting import PATIENCE

pytest.importorskip("textual", reason="pip install relaxd[watch]")

from textual.pilot import Pilot

from relaxd.cli.reading.full_screen import WatchApp, curve


class Answers(coordinator_pb2_grpc.CoordinatorServicer):
    """Shows one run, ten times a second, and its steps once."""

    def __init__(self) -> None:
        self.run = pb.Run(run_id="r", state=pb.RUN_STATE_RUNNING, step=3, steps=9, remaining_seconds=72)
        self.asked = ""

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self.run)

    async def ListSamples(self, request: pb.ListSamplesRequest, context: Any) -> pb.ListSamplesResponse:
        return pb.ListSamplesResponse(samples=[pb.TrainedSample(step=3, prompt="What is 1 + 2?", response="\x1b[2J3")])

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        self.asked = request.resume_token
        steps = [
            pb.StepMetrics(step=step, metrics={"reward_mean": step / 4, "entropy": 2.5, "other": 1.0})
            for step in (1, 2, 3)
        ]
        yield pb.WatchRunResponse(run=self.run, steps=steps)
        while True:
            await asyncio.sleep(0.1)
            yield pb.WatchRunResponse(run=self.run)


def screen(app: WatchApp) -> str:
    """Return the text on the screen."""
    lines = re.findall(r"<text[^>]*>(.*?)</text>", app.export_screenshot())
    return html.unescape("\n".join(lines)).replace("\xa0", " ")


async def until(pilot: Pilot[int], app: WatchApp, condition: Callable[[str], bool]) -> str:
    async with asyncio.timeout(20 * PATIENCE):
        while not condition(text := screen(app)):
            await pilot.pause(0.05)
    return text


async def test_the_screen_shows_flow_curve_why_and_alarms_and_keys_change_it() -> None:
    answers, add = Answers(), coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    answers.run.waiting_for = "step 4 lacks 3 of its 16 groups"
    answers.run.wait.evidence.append("rollout-1 holds 3 \x1b[2J groups")
    answers.run.wait.advice.append("relaxd scale rollout=2")
    answers.run.queues.add(stage="reward", waiting=4, held=2)
    answers.run.groups.published = 14
    answers.run.alarms.add(kind=pb.ALARM_KIND_METRIC, first_step=2, text="kl is 0.4, above 0.2")
    with (
        serve_in_thread([(add, answers, "relaxd.v1.Coordinator")]) as port,
        CoordinatorClient(f"127.0.0.1:{port}") as client,
    ):
        app = WatchApp(client, answers.run, lambda: None)
        async with app.run_test(size=(150, 45)) as pilot:
            text = await until(pilot, app, lambda text: "steps 1 to 3, 0.25 to 0.75" in text and "next curve" in text)
            assert answers.asked == "0"  # earlier steps belong to the curve, too
            for expected in ("step 3/9; 12 s a step; about 72 s left", "2 held, 4 waiting", "published 14",
                             "step 4 lacks 3 of its 16 groups", "→ relaxd scale rollout=2", "kl is 0.4, above 0.2",
                             "reward_mean", "█", "quit"):  # fmt: skip
                assert expected in text, text
            assert "\x1b" not in text
            await pilot.press("m")
            await until(pilot, app, lambda text: "steps 1 to 3, 2.5 to 2.5" in text)
            await pilot.press("s")
            text = await until(pilot, app, lambda text: "What is 1 + 2?" in text)
            assert "\\u001b[2J3" in text
            answers.run.alarms.pop()
            await until(pilot, app, lambda text: "no alarm" in text)
            await pilot.press("q")
        assert (app.return_value, app.error) == (0, None)


async def test_the_screen_closes_when_the_run_ends_and_when_it_cannot_be_followed() -> None:
    answers, add = Answers(), coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    with (
        serve_in_thread([(add, answers, "relaxd.v1.Coordinator")]) as port,
        CoordinatorClient(f"127.0.0.1:{port}") as client,
    ):
        app = WatchApp(client, answers.run, lambda: None)
        async with app.run_test() as pilot:
            await until(pilot, app, lambda text: "step 3/9" in text)
            answers.run.state = pb.RUN_STATE_STOPPED
            async with asyncio.timeout(20 * PATIENCE):
                while app.return_value is None:
                    await pilot.pause(0.05)
        assert app.view.run.state == pb.RUN_STATE_STOPPED
        assert app.error is None


class Terminal:
    """Start `relaxd watch` on a new terminal."""

    def __init__(self, port: int) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 45, 150, 0, 0))
        command = ("-m", "relaxd.cli", "watch", "r", "--coordinator", f"127.0.0.1:{port}")
        environment = {"TERM": "xterm-256color", "CI": ""}
        self.process = start_python(*command, environment=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.output = ""

    def until(self, text: str) -> None:
        """Read until the text was shown."""
        deadline = time.monotonic() + 60 * PATIENCE
        while text not in self.output:
            assert time.monotonic() < deadline, self.output[-2000:]
            if select.select([self._ours], [], [], 0.5)[0]:
                self.output += os.read(self._ours, 65536).decode(errors="replace")

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def close(self) -> None:
        kill(self.process)
        os.close(self._ours)


LEFT = "\x1b[?1049l"
"""Escape sequence with which a terminal leaves the full screen."""


@pytest.mark.parametrize("end", ["q", "ctrl+c", "SIGTERM"])
def test_the_command_leaves_the_terminal_as_it_was(end: str) -> None:
    answers, add = Answers(), coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    with serve_in_thread([(add, answers, "relaxd.v1.Coordinator")]) as port:
        terminal = Terminal(port)
        try:
            terminal.until("next curve")
            if end == "SIGTERM":
                terminal.process.send_signal(signal.SIGTERM)
            else:
                terminal.press({"q": b"q", "ctrl+c": b"\x03"}[end])
            terminal.until(LEFT)
            terminal.until("12 s a step; about 72 s left")  # the last picture stays
            assert terminal.process.wait(30) == {"q": 0, "ctrl+c": 130, "SIGTERM": 143}[end]
        finally:
            terminal.close()
        assert "Traceback" not in terminal.output


CURVES = [
    ([], 4, 2, []),
    ([1.0, 1.0], 4, 1, ["▁▁▁▁"]),
    ([0.0, 1.0], 4, 2, ["  ██", "▁▁██"]),
    ([0.0, 0.0, 1.0, 1.0], 2, 1, ["▁█"]),
    ([0.0, 0.5, 1.0], 6, 1, ["▁▁▅▅██"]),
    ([1.0], 0, 3, []),
]


@pytest.mark.parametrize(("values", "width", "height", "rows"), CURVES)
def test_curves(values: list[float], width: int, height: int, rows: list[str]) -> None:
    assert curve(values, width, height) == rows
