"""Notifications of a run: the messages for each address, when messages are due, and sending with Apprise.

Addresses are secrets: displayed names don't contain them.
"""

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from relaxd.waiting import duration

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class QuietHours:
    """Hours of a day in which no messages are sent until the run ends; may pass midnight. Equal start and end: none."""

    start: int
    """Minute of the day at which the quiet hours begin."""
    end: int
    """Minute of the day at which the quiet hours end."""

    def include(self, time: datetime) -> bool:
        """Return True if a local time is within the quiet hours."""
        minute = time.hour * 60 + time.minute
        if self.start <= self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


NO_QUIET_HOURS = QuietHours(0, 0)


def parse_quiet_hours(text: str) -> QuietHours:
    """Parse quiet hours such as "22:00-07:00"; "" means none. Raises ValueError."""
    if not text:
        return NO_QUIET_HOURS
    match = _HOURS.fullmatch(text)
    if match is None or match[1] + match[2] == match[3] + match[4]:
        raise ValueError('expected two times of the day that differ, such as "22:00-07:00"')
    return QuietHours(int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4]))


Level = Literal["info", "success", "warning", "failure"]
LEVELS: tuple[Level, ...] = ("info", "success", "warning", "failure")
"""Levels of messages, as Apprise names them, from the least to the most urgent."""
MAX_PENDING = 50
"""Maximum number of waiting messages; older ones are dropped."""
MAX_TOLD = 1000
"""Maximum number of announced alarms that are remembered."""
OVER_SECONDS = 60.0
"""Seconds after which a vanished alarm counts as ended. An alarm that returns sooner, as after a restart, is the same
alarm."""
REPORTED = (
    "reward_mean",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "response_length_mean",
    "tokens_per_second",
    "step_seconds",
)
"""Names of the metrics in a report message. A report leaves out metrics that the run doesn't have."""


@dataclass(frozen=True)
class Message:
    """Notification about a run, for one address."""

    title: str
    body: str
    level: Level


@dataclass
class ToldAlarm:
    """An alarm whose beginning was announced. Times are Unix times."""

    told: float
    """Time at which the alarm's beginning was announced."""
    began: float
    first_step: int
    text: str
    gone: float | None = None
    """Time at which the run's status first lacked the alarm; None while the status has it."""
    over: bool = False
    """True once the alarm's end was announced, or the run ended; stays True if it begins again without a message."""


class Outbox:
    """Collects messages about a run for one address until they are sent.

    It compares the run's status with its messages so far, so that none is sent twice after a restart.
    """

    def __init__(
        self, run: str, quiet: QuietHours, repeat_seconds: float, every: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """`every`: steps between reports; 0: no reports. `state`: record of the messages sent before a restart."""
        state = state or {}
        self._run = run
        self._quiet = quiet
        self._repeat_seconds = repeat_seconds
        self._every = every
        self._events: dict[str, str] = dict(state.get("events", {}))
        """Times of the announced events, as the run's status gives them, by event: "begin", "pause" or "end"."""
        self._alarms = {name: ToldAlarm(**one) for name, one in state.get("told_alarms", {}).items()}
        """Announced alarms, by name."""
        self._reported: tuple[int, dict[str, float]] | None = None
        """Step and metrics of the last report, sent or not."""
        self._report_step: int | None = state.get("report_step")
        self._latest: tuple[int, dict[str, float]] | None = None
        """Number and metrics of the newest step."""
        self._pending: list[tuple[datetime, Message]] = []
        self._report: tuple[datetime, Message] | None = None
        self._left_out = 0
        self._ended = False
        self._state: dict[str, Any] = dict(state)

    @property
    def state(self) -> dict[str, Any]:
        """Record of the sent messages, as JSON values: kept across a restart, so that none is sent twice."""
        return self._state

    def observe(self, status: Mapping[str, Any], now: datetime) -> None:
        """Process the run's status: state, reason, step, steps, begin_time, pause_time, end_time, alarms."""
        state, step = status["state"], status["step"]
        self._ended = state in ("stopped", "failed")
        where = f"step {step} of {status['steps']}"
        if self._is_news("begin", status["begin_time"]):
            title = f"run {self._run} goes on" if step else f"run {self._run} begins"
            self._add(now, Message(title, where, "info"))
        if status["pause_time"] and self._is_news("pause", status["pause_time"]):
            body = f"{status['reason']}\n{where}"
            self._add(now, Message(f"run {self._run} is paused", body, "warning"))
        self._observe_alarms(status, now)
        if self._ended and self._is_news("end", status["end_time"]):
            failed = state == "failed"
            body = "\n".join([status["reason"], where, *self._numbers()])
            title = f"run {self._run} {'failed' if failed else 'has ended'}"
            self._add(now, Message(title, body, "failure" if failed else "success"))

    def observe_step(self, step: int, metrics: Mapping[str, Any], now: datetime) -> None:
        """Process the metrics of a step. Every `every` steps, makes a report, which replaces a report not yet sent."""
        numbers = {name: float(metrics[name]) for name in REPORTED if isinstance(metrics.get(name), int | float)}
        self._latest = (step, numbers)
        if not self._every or step // self._every <= (self._report_step or 0) // self._every:
            return
        body = "\n".join(self._numbers())
        self._report = (now, Message(f"run {self._run}: step {step}", body, "info"))
        self._reported, self._report_step = self._latest, step

    def due(self, now: datetime) -> Message | None:
        """Return a message that joins all waiting ones; None if none waits, or in quiet hours before the run's end."""
        waiting = sorted([*self._pending, *([self._report] if self._report else [])], key=lambda one: one[0])
        if not waiting or (self._quiet.include(now) and not self._ended):
            return None
        if len(waiting) == 1 and not self._left_out:
            return waiting[0][1]
        level = max((message.level for _, message in waiting), key=LEVELS.index)
        title = next(message.title for _, message in reversed(waiting) if message.level == level)
        parts = [f"{time:%H:%M} {message.title}\n{message.body}" for time, message in waiting]
        if self._left_out:
            parts.insert(0, f"{self._left_out} earlier messages are left out")
        return Message(title, "\n\n".join(parts), level)

    def sent(self) -> None:
        """Record that the message of `due` was sent, so that no message waits."""
        self._pending, self._report, self._left_out = [], None, 0
        self._state = {
            "events": dict(self._events),
            "told_alarms": {name: asdict(one) for name, one in self._alarms.items()},
            "report_step": self._report_step,
        }

    def _is_news(self, event: str, time: str) -> bool:
        before, self._events[event] = self._events.get(event), time
        return before != time

    def _observe_alarms(self, status: Mapping[str, Any], now: datetime) -> None:
        """Add a message for each alarm that began or ended. The end of the run ends all alarms without messages."""
        time, going_on = now.timestamp(), {alarm["name"] for alarm in status["alarms"]}
        for alarm in status["alarms"]:
            if self._alarm_is_news(alarm, time):
                body = f"since step {alarm['first_step']}: {alarm['text']}"
                self._add(now, Message(f"run {self._run}: alarm", body, "warning"))
        for name, known in self._alarms.items():
            if name not in going_on and known.gone is None:
                known.gone = time
            if self._ended:
                known.over = True
            elif not known.over and known.gone is not None and time - known.gone >= OVER_SECONDS:
                known.over = True
                lasted = f"It went on for {duration(known.gone - known.began)}, from step {known.first_step}"
                body = f"{lasted} to step {status['step']}: {known.text}"
                self._add(now, Message(f"run {self._run}: alarm is over", body, "success"))

    def _alarm_is_news(self, alarm: Mapping[str, Any], time: float) -> bool:
        """Record that an alarm is open now. Returns True if its beginning should be announced."""
        name, first_step, text = alarm["name"], alarm["first_step"], alarm["text"]
        known, began = self._alarms.get(name), time
        if known is not None:
            if known.over and known.gone is not None:
                known.began, known.first_step = time, first_step
            known.gone, known.text, began = None, text, known.began
            if not known.over or time - known.told < self._repeat_seconds:
                return False
        self._alarms.pop(name, None)
        self._alarms[name] = ToldAlarm(time, began, first_step, text)
        for old in list(self._alarms)[:-MAX_TOLD]:
            del self._alarms[old]
        return True

    def _add(self, now: datetime, message: Message) -> None:
        self._pending.append((now, message))
        excess = len(self._pending) - MAX_PENDING
        if excess > 0:
            self._pending = self._pending[excess:]
            self._left_out += excess

    def _numbers(self) -> Sequence[str]:
        """Return a line for each number of the last step, with its change since the last report."""
        if self._latest is None:
            return []
        before = self._reported[1] if self._reported is not None else {}
        return [
            f"{name} {value:.4g}" + (f" ({value - before[name]:+.3g})" if name in before else "")
            for name, value in self._latest[1].items()
        ]


VARIABLE = "RELAXD_ALERT_URLS"
"""Environment variable with the addresses, if no file is named."""
_SEPARATOR = re.compile(r"[\s,]+(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_EVERY = re.compile(r"[?&]freq=(?P<steps>[^&]*)")
_STATUS = re.compile(r"error=(\d{3})\b")


class UrlProblem(Exception):
    """Addresses to notify can't be read or used. The error's message doesn't contain the addresses."""


@dataclass(frozen=True)
class AlertUrl:
    """Address that gets a run's notifications."""

    number: int
    """Position of the address in the user's list, counted from 1."""
    address: str = field(repr=False)
    """Apprise URL, without relaxd's option `freq`."""
    every: int
    """Steps between two reports; 0: the address gets no reports."""

    @property
    def shown(self) -> str:
        """Name for display, such as "URL 2 (slack)". The rest of the address may be secret."""
        return f"URL {self.number} ({self.address.partition('://')[0].lower()})"


def read_urls(file: str, environment: Mapping[str, str]) -> list[AlertUrl]:
    """Return the addresses in a file, or without one in the environment. Raises UrlProblem."""
    if not file:
        return parse_urls(environment.get(VARIABLE, ""), VARIABLE)
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UrlProblem(f"alerts.urls_file = {file!r} can't be read: {type(error).__name__}") from error
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return parse_urls("\n".join(lines), file)


def parse_urls(text: str, origin: str) -> list[AlertUrl]:
    """Return the addresses in a text, separated by blanks, lines or commas. Raises UrlProblem, which names `origin`."""
    found = []
    for number, address in enumerate(_SEPARATOR.split(text.strip()) if text.strip() else (), 1):
        if "://" not in address or re.search(r"\s", address):
            raise UrlProblem(f"{origin}: URL {number} is none: expected an Apprise URL, such as json://HOST/PATH")
        match = _EVERY.search(address)
        if match is not None and re.fullmatch(r"[1-9]\d{0,8}", match["steps"]) is None:
            raise UrlProblem(f"{origin}: URL {number}: freq must be a number of steps, 1 or more")
        found.append(AlertUrl(number, _without_every(address), int(match["steps"]) if match else 0))
    return found


def _without_every(address: str) -> str:
    """Remove `freq` from an address, and keep its other options."""
    path, mark, query = address.partition("?")
    options = [one for one in query.split("&") if one and not one.startswith("freq=")]
    return path + (mark + "&".join(options) if options else "")


class _StatusCodes(logging.Handler):
    """Log handler that keeps, by thread, the HTTP status in Apprise's log messages. Other text may have secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int | None, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if match := _STATUS.search(record.getMessage()):
            self.found[record.thread] = match[1]


_codes = _StatusCodes()


class Sender:
    """Sends messages to one address with Apprise. Used by a single thread."""

    def __init__(self, url: AlertUrl) -> None:
        """Raises UrlProblem if Apprise is missing or can't read the address."""
        try:
            from apprise import Apprise  # only who sends needs it
        except ImportError as error:
            raise UrlProblem('Apprise is missing: "pip install relaxd[alerts]"') from error
        log = logging.getLogger("apprise")
        log.propagate = False
        if _codes not in log.handlers:
            log.addHandler(_codes)
        self._target = Apprise.instantiate(url.address, suppress_exceptions=True)
        if self._target is None:
            raise UrlProblem("Apprise can't read this address: compare it with the list on https://appriseit.com")

    def send(self, message: Message) -> str:
        """Send a message, within Apprise's time-outs. Returns the problem; "" if the message was accepted."""
        from apprise import NotifyFormat, NotifyType

        thread = threading.get_ident()
        _codes.found.pop(thread, None)
        try:
            sent = self._target.notify(
                title=message.title,
                body=message.body,
                notify_type=NotifyType(message.level),
                body_format=NotifyFormat.TEXT,
            )
        except Exception as error:  # a service of Apprise may raise anything, with the address in its text
            return f"{type(error).__name__} in Apprise"
        if sent:
            return ""
        code = _codes.found.pop(thread, "")
        return f"answered with HTTP status {code}" if code else "can't be reached"
