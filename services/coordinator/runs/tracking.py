"""Starts, watches and restarts the process of a run's trackers and notifiers. While the run trains, it never waits for
this process.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import relaxd
from relaxd.alerts.notifications import VARIABLE
from relaxd.config import RunConfig
from relaxd.process.child import ChildExit
from relaxd.telemetry.logs import escape
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.waiting import Backoff

logger = logging.getLogger(__name__)

MODULE = "relaxd.trackers"
FINISH_SECONDS = 30.0
"""Maximum seconds after a run's end in which trackers may send their remaining data."""
STOP_SECONDS = 10.0
"""Maximum seconds in which trackers may send their remaining data when the coordinator is stopped."""
RESTARTS = Backoff(first_seconds=1.0, max_seconds=60.0)
"""Pauses before the trackers' process is restarted. A process that ran for longer than the maximum pause resets the
back-off."""
LINE_BYTES = 1 << 20
KILL_SECONDS = 5.0
"""Maximum seconds for the kernel to end a killed process."""
SECRETS = ("RELAXD_", "REDIS_URL")
"""Prefixes of environment variables that trackers don't get, because they configure services."""
PROCESS = (pb.ALARM_KIND_TRACKER, "their process")
"""Alarm kind and name for problems of the trackers' process itself, rather than of one tracker."""
MAX_UNREAD_BYTES = 1 << 20
"""Maximum bytes of run statuses that the trackers' process hasn't read yet; above this limit none are sent."""

_BOOTSTRAP = f"""
import importlib.util, runpy, sys
place = {str(Path(relaxd.__file__))!r}
spec = importlib.util.spec_from_file_location("relaxd", place, submodule_search_locations=[place.rpartition("/")[0]])
sys.modules["relaxd"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_module({MODULE!r}, run_name="__main__")
"""
"""Source of a program that runs MODULE in the interpreter of tracking.python. The program loads relaxd from its path;
adding relaxd's parent folder to sys.path could make this interpreter's packages importable, too."""


class Tracking:
    """Runs the process of trackers and notifiers, which reads the run's folder, and stores their problems."""

    def __init__(self, run_id: str, config: RunConfig, folder: Path, step: Callable[[], int]) -> None:
        """`step` returns the number of the run's last step."""
        self._run_id = run_id
        self._python = config.tracking.python
        self._given = {
            "run_id": run_id,
            "folder": str(folder.resolve()),
            "tracking": config.tracking.model_dump(mode="json"),
            "alerts": config.alerts.model_dump(mode="json") if _notifies(config) else None,
        }
        self._step = step
        self._status: Mapping[str, Any] | None = None
        """The run's newest status, for notifiers; None before the first."""
        self._written: Mapping[str, Any] | None = None
        """The last status that was sent to the process; None before the first."""
        self._problems: dict[tuple[pb.AlarmKind.ValueType, str], tuple[int, str]] = {}
        """Problems of trackers and notifiers, by kind and name: the step at which each began, and its text."""
        self._told: set[tuple[pb.AlarmKind.ValueType, str]] = set()
        """Trackers and notifiers whose problems were logged as warnings."""
        self._process: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        """Event that is set when the trackers' process has ended after the run's end."""
        self._finishing = False

    def alarms(self) -> list[pb.Alarm]:
        """Return the current problems of trackers and notifiers as alarms."""
        return [
            pb.Alarm(kind=kind, name=name, first_step=step, text=f"{_shown(kind, name)}: {problem}")
            for (kind, name), (step, problem) in self._problems.items()
        ]

    def tell(self, status: Mapping[str, Any]) -> None:
        """Send the run's status to notifiers. Never waits; an unchanged status is not sent again."""
        self._status = status
        process = self._process
        if self._given["alerts"] is None or process is None or process.stdin is None or status == self._written:
            return
        if process.stdin.is_closing() or process.stdin.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            return
        process.stdin.write(json.dumps(status).encode() + b"\n")
        self._written = status

    async def run_forever(self) -> None:
        """Run the process of trackers and notifiers until cancelled; restart it if it ends before the run does."""
        failures = 0
        while not self._finishing:
            began = time.monotonic()
            why = await self._run_once()
            if self._finishing:
                break
            failures = 1 if time.monotonic() - began > RESTARTS.max_seconds else failures + 1
            self._set_problem(PROCESS, f"{why}; it is started again")
            await asyncio.sleep(RESTARTS.pause(failures))  # idle: the problem is an alarm of the run
        self._ended.set()
        await asyncio.Event().wait()  # a helper of a run must not return

    async def finish(self) -> None:
        """Report the run's end to the process, and wait at most FINISH_SECONDS for the process to end."""
        self._finishing = True
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.write(b"end\n")
                self._process.stdin.close()
            try:
                async with asyncio.timeout(FINISH_SECONDS):
                    await self._ended.wait()
            except TimeoutError:
                logger.warning(
                    "run %s: its trackers have not sent everything within %.0f s; they are ended",
                    self._run_id,
                    FINISH_SECONDS,
                )

    async def _run_once(self) -> str:
        """Start the process and read its reports until it ends. Returns the reason of its end."""
        python = self._python or sys.executable
        program = [python, "-c", _BOOTSTRAP] if self._python else [python, "-m", MODULE]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
        if VARIABLE in os.environ:
            environment[VARIABLE] = os.environ[VARIABLE]
        try:
            process = await asyncio.create_subprocess_exec(
                *program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # only the coordinator handles an interrupt from the terminal
                limit=LINE_BYTES,
                env=environment,
            )
        except OSError as error:
            return f"{python} can't be started: {error}"
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        try:
            process.stdin.write(json.dumps(self._given).encode() + b"\n")
            self._written = None
            if self._status is not None:
                self.tell(self._status)
            while line := await process.stdout.readline():
                self._read_report(line)
            code = await self._stop(process)
        except ValueError:
            return f"reported a line of more than {LINE_BYTES} bytes"
        finally:
            self._process = None
            if process.returncode is None:
                await self._stop(process)
        return str(ChildExit(code))

    async def _stop(self, process: asyncio.subprocess.Process) -> int:
        """End the process by closing its input; kill it if it is still running after STOP_SECONDS."""
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                return await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
        async with asyncio.timeout(KILL_SECONDS):
            return await process.wait()

    def _read_report(self, line: bytes) -> None:
        try:
            report = json.loads(line)
            kind = pb.ALARM_KIND_NOTIFIER if "notifier" in report else pb.ALARM_KIND_TRACKER
            name = report["notifier"] if "notifier" in report else report["tracker"]
            self._set_problem((kind, str(name)), escape(str(report["problem"])))
        except (ValueError, KeyError, TypeError):
            logger.warning("run %s: its trackers' process reports %r", self._run_id, line[:200])
        else:
            self._problems.pop(PROCESS, None)

    def _set_problem(self, who: tuple[pb.AlarmKind.ValueType, str], problem: str) -> None:
        """Store the problem of a tracker or notifier; "" removes it. The first problem of each is logged as a
        warning."""
        before = self._problems.pop(who, None)
        if problem:
            self._problems[who] = (before[0] if before else self._step(), problem)
            if who not in self._told:
                self._told.add(who)
                logger.warning("run %s goes on without %s: %s", self._run_id, _shown(*who), problem)
        elif before is not None:
            logger.info("run %s: %s works again", self._run_id, _shown(*who))


def needs_process(config: RunConfig) -> bool:
    """Return True if the run has trackers, or addresses to notify."""
    return bool(config.tracking.trackers) or _notifies(config)


def _notifies(config: RunConfig) -> bool:
    return bool(config.alerts.urls_file or os.environ.get(VARIABLE, "").strip())


def _shown(kind: pb.AlarmKind.ValueType, name: str) -> str:
    """Return the name of a tracker or notifier for messages; a notifier's address is missing if none could be read."""
    if kind == pb.ALARM_KIND_TRACKER:
        return f"tracker {name}"
    return f"notifications to {name}" if name else "notifications"
