"""A thread that notifies one address of a run's alarms, its end and its steps (docs/alerts.md)."""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from relaxd.alerts.outbox import Outbox, parse_quiet_hours
from relaxd.alerts.urls import AlertUrl, Sender, UrlProblem
from relaxd.run_folder import METRICS, replace_file
from relaxd.trackers.feed import FollowedFile

POLL_SECONDS = 1.0
RETRY_SECONDS = 60.0
"""Seconds between a failed message and the next attempt."""
LAST_TRIES = 2
"""Number of attempts to send the remaining messages at the end."""
LAST_PAUSE_SECONDS = 2.0
MAX_STATUSES = 1000
"""Maximum number of statuses that wait for a sending thread; older ones are dropped."""
FOLDER = "alerts"
"""Folder in the run's folder with the state of each address's messages, by its number."""

Report = Callable[[str, str], None]
"""Function that is called with an address's name and its problem, "" once it works."""


class Notifier(threading.Thread):
    """Notifies one address until `end`. No error leaves this class."""

    def __init__(self, url: AlertUrl, run_id: str, folder: Path, settings: Mapping[str, Any], report: Report) -> None:
        """`settings` is the section [alerts] of the configuration."""
        super().__init__(name=url.shown, daemon=True)
        self._url = url
        self._report = report
        self._state = folder / FOLDER / f"url-{url.number}.json"
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
        """Unprocessed statuses, with their arrival times."""
        self._last_status: Mapping[str, Any] | None = None
        self._wake = threading.Event()
        self._ending = threading.Event()

    def tell(self, status: Mapping[str, Any]) -> None:
        """Hand over the run's newest status. Called from another thread."""
        self._statuses.append((self._now(), status))
        self._wake.set()

    def end(self) -> None:
        """Have the thread send due messages and end."""
        self._ending.set()
        self._wake.set()

    def run(self) -> None:
        """Send due messages until the end."""
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
        """Process news and send due messages. Returns whether none is left to send."""
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
        """Return the time in the time zone of the quiet hours."""
        return datetime.now().astimezone(self._zone)

    def _read_steps(self, now: datetime) -> None:
        """Process new steps in the run's folder."""
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
