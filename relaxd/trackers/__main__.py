"""The trackers' process: `python -m relaxd.trackers`, started by the coordinator.

Its first line of input is the run as JSON: run_id, folder, the section [tracking], and the section [alerts] if there
are addresses to notify. Each further line is the run's status, as JSON. The line "end" means that the run has ended;
the end of the input means that the coordinator has ended. It prints lines of JSON: a tracker or notifier, and its
problem. Each address has a thread, which notifies it of the run's alarms, its end and its steps (docs/alerts.md).
"""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from zoneinfo import ZoneInfo

from relaxd.alerts.notifications import VARIABLE, AlertUrl, Outbox, Sender, UrlProblem, parse_quiet_hours, read_urls
from relaxd.run_folder import CODE, CONFIG, METRICS, replace_file
from relaxd.trackers.feed import FOLDER, Feed, FollowedFile
from relaxd.trackers.tracker import TrackedRun, redact

POLL_SECONDS = 1.0
RETRY_SECONDS = 60.0
"""Seconds between a failed attempt to send a message and the next attempt."""
LAST_TRIES = 2
"""Maximum number of attempts to send the remaining messages when the process ends."""
LAST_PAUSE_SECONDS = 2.0
MAX_STATUSES = 1000
"""Maximum number of run statuses queued for a notifier; older ones are dropped."""
ALERTS_FOLDER = "alerts"
"""Subfolder of the run's folder with the state of each address's messages, named by the address's number."""

Report = Callable[[str, str], None]
"""Callback that receives an address's name and its problem, or "" once the address works."""


class Notifier(threading.Thread):
    """Sends a run's notifications to one address until `end` is called. Never raises."""

    def __init__(self, url: AlertUrl, run_id: str, folder: Path, settings: Mapping[str, Any], report: Report) -> None:
        """Create a notifier. `settings` is the section [alerts] of the configuration."""
        super().__init__(name=url.shown, daemon=True)
        self._url = url
        self._report = report
        self._state = folder / ALERTS_FOLDER / f"url-{url.number}.json"
        self._zone = ZoneInfo(settings["time_zone"]) if settings["time_zone"] else None
        self._metrics = FollowedFile(folder / METRICS)
        self._outbox = Outbox(
            run_id,
            parse_quiet_hours(settings["quiet_hours"]),
            settings["repeat_seconds"],
            url.every,
            self._read_state(),
        )
        self._statuses: deque[tuple[datetime, Mapping[str, Any]]] = deque(maxlen=MAX_STATUSES)
        """Unprocessed statuses of the run, with their arrival times."""
        self._last_status: Mapping[str, Any] | None = None
        self._wake = threading.Event()
        self._ending = threading.Event()

    def tell(self, status: Mapping[str, Any]) -> None:
        """Queue the run's newest status for the sending thread. Called from another thread."""
        self._statuses.append((self._now(), status))
        self._wake.set()

    def end(self) -> None:
        """Tell the thread to send the messages that are due and then to stop."""
        self._ending.set()
        self._wake.set()

    def run(self) -> None:
        """Send messages when they are due, until `end` is called."""
        try:
            sender = Sender(self._url)
        except UrlProblem as problem:
            self._report(self.name, str(problem))
            return
        while not self._ending.is_set():
            if self._send(sender):
                self._wake.wait(POLL_SECONDS)  # idle: the run has no news
            else:
                self._ending.wait(RETRY_SECONDS)  # idle: the problem is reported
            self._wake.clear()
        for _ in range(LAST_TRIES):
            if self._send(sender):
                return
            time.sleep(LAST_PAUSE_SECONDS)  # brief: LAST_TRIES

    def _send(self, sender: Sender) -> bool:
        """Process new statuses and steps, and send the message that is due.

        Return True if no message is left to send.
        """
        try:
            now = self._now()
            with contextlib.suppress(OSError):  # the next look reads it
                self._read_steps(now)
            while self._statuses:
                came, self._last_status = self._statuses.popleft()
                self._outbox.observe(self._last_status, came)
            if self._last_status is not None:  # an alarm that began again may have become news
                self._outbox.observe(self._last_status, now)
            message = self._outbox.due(now)
            if message is None:
                return True
            problem = sender.send(message)
        except Exception as error:  # an alert costs no run
            problem = f"{type(error).__name__} when its message was made"
        if problem:
            self._report(self.name, f"{problem}; it is tried again every {RETRY_SECONDS:.0f} s")
            return False
        self._outbox.sent()
        self._report(self.name, "")
        with contextlib.suppress(OSError):  # after a restart it may be told again
            self._write_state()
        return True

    def _now(self) -> datetime:
        """Return the current time in the time zone of the quiet hours."""
        return datetime.now().astimezone(self._zone)

    def _read_steps(self, now: datetime) -> None:
        """Pass new steps in metrics.jsonl to the outbox."""
        while lines := self._metrics.read()[1]:
            for line in lines:
                if isinstance(line.get("step"), int):
                    self._outbox.observe_step(line["step"], line, now)

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def _write_state(self) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._state, json.dumps(self._outbox.state))


CHECK_SECONDS = 1.0
END_SECONDS = 60.0
"""Maximum seconds for trackers to send remaining data after the end of the run or the coordinator."""


class Reports:
    """Prints the problem of each tracker and notifier as JSON whenever it changes; "" means no problem."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._problems: dict[tuple[str, str], str] = {}

    def set(self, kind: str, name: str, problem: str) -> None:
        """Record the problem of a "tracker" or "notifier", "" if it works, and print it if it changed."""
        with self._lock:
            if self._problems.get((kind, name)) != problem:
                self._problems[kind, name] = problem
                with contextlib.suppress(OSError):  # the coordinator has ended
                    print(json.dumps({kind: name, "problem": problem}), file=self._output, flush=True)


def tracked_run(given: dict[str, Any]) -> TrackedRun:
    """Return the run that the coordinator's JSON describes. Raises OSError: the run's folder can't be read."""
    folder, settings = Path(given["folder"]), given["tracking"]
    code = folder / CODE
    return TrackedRun(
        run_id=given["run_id"],
        folder=folder,
        name=settings["name"] or given["run_id"],
        project=settings["project"],
        config=redact(json.loads((folder / CONFIG).read_text())),
        code=json.loads(code.read_text()) if code.is_file() else {},
        settings=settings,
    )


def make_notifiers(given: dict[str, Any], folder: Path, reports: Reports) -> list[Notifier]:
    """Return a notifier for each address, and remove the addresses' secrets from the environment, so that no tracker
    finds them."""
    settings = given.get("alerts")
    environment = {VARIABLE: os.environ.pop(VARIABLE, "")}
    if settings is None:
        return []
    try:
        urls = read_urls(settings["urls_file"], environment)
    except UrlProblem as problem:
        reports.set("notifier", "", str(problem))
        return []
    report = partial(reports.set, "notifier")
    return [Notifier(url, given["run_id"], folder, settings, report) for url in urls]


def run_trackers(given: dict[str, Any], reports: Reports) -> None:
    """Feed a run's trackers and notifiers until the input ends, and for up to END_SECONDS longer."""
    run = tracked_run(given)
    notifiers = make_notifiers(given, run.folder, reports)
    feeds = [Feed(name, run, partial(reports.set, "tracker")) for name in run.settings["trackers"]]
    ending = threading.Event()

    def await_end() -> None:
        run_ended = False
        while not run_ended and (line := sys.stdin.readline()):
            run_ended = line.strip() == "end"
            for notifier in () if run_ended else notifiers:
                notifier.tell(json.loads(line))
        for notifier in notifiers:
            notifier.end()
        for feed in feeds:
            feed.end(run_ended=run_ended)
        ending.set()

    threading.Thread(target=await_end, daemon=True).start()
    lock = run.folder / FOLDER / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if ending.wait(CHECK_SECONDS):  # brief: the process of an earlier coordinator ends in END_SECONDS
                    return
        for thread in (*feeds, *notifiers):
            thread.start()
        while not ending.wait(CHECK_SECONDS):  # idle: watches the threads
            for feed in feeds:
                feed.check()
        deadline = time.monotonic() + END_SECONDS
        for thread in (*feeds, *notifiers):
            thread.join(max(0.0, deadline - time.monotonic()))


def main() -> None:
    """Run the trackers and notifiers of the run that the first line of input describes."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # trackers may print what they like
    os.nice(5)
    with contextlib.suppress(OSError):  # if memory is short, this process has to go first
        Path("/proc/self/oom_score_adj").write_text("1000")
    run_trackers(json.loads(sys.stdin.readline()), Reports(output))
    sys.stderr.flush()
    os._exit(0)  # without threads that hang


if __name__ == "__main__":
    main()
