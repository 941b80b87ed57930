"""Addresses to notify, and sending to them with Apprise. Addresses are secrets: displayed names don't contain them."""

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relaxd.alerts.outbox import Message

VARIABLE = "RELAXD_ALERT_URLS"
"""Environment variable with the addresses, if no file is named."""
_SEPARATOR = re.compile(r"[\s,]+(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_EVERY = re.compile(r"[?&]freq=(?P<steps>[^&]*)")
_STATUS = re.compile(r"error=(\d{3})\b")


class UrlProblem(Exception):
    """Addresses can't be read or used. The message doesn't contain them."""


@dataclass(frozen=True)
class AlertUrl:
    """An address that is notified."""

    number: int
    """Position of the address in the list, counted from 1."""
    address: str = field(repr=False)
    """The address for Apprise, without `freq`."""
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
    """Keeps the HTTP status that Apprise logs, by thread. The rest of its messages may have secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int | None, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if match := _STATUS.search(record.getMessage()):
            self.found[record.thread] = match[1]


_codes = _StatusCodes()


class Sender:
    """Sends to one address. Used by one thread."""

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
