"""Messages that users' code sends to people by `notify`, and their way to the run's alarms.

A process with users' code keeps messages until its next answer carries them to its service. The service's heartbeats
have the messages of the last minutes.
"""

import threading
import time
from collections.abc import Callable, Iterable

MAX_CHARACTERS = 300
"""Maximum length of a message, in characters; a longer one is cut off."""
MAX_WAITING = 20
"""Maximum number of messages that wait in a process for its next answer; further ones are dropped."""
MAX_TOLD = 8
"""Maximum number of messages of a replica at once; further ones are dropped."""
KEPT_SECONDS = 600.0
"""Seconds for which a message stays an alarm after it was last sent."""

Told = Callable[[Iterable[str]], None]
"""Function that receives the messages that users' code sent by `notify`."""
_lock = threading.Lock()
_waiting: dict[str, None] = {}


def notify(text: str) -> None:
    """Send a message to the people who watch the run, as an alarm: on the screen, and where `[alerts]` sends alarms.

    Call it in rewards and environments, from any thread. The alarm ends ten minutes after the last call with its text.
    Outside of a run nothing happens.

    Args:
        text: the message, at most 300 characters; a longer text is cut off. Equal texts count as a single alarm, so
        leave out details that differ each time. A replica keeps at most 8 texts at once and drops further ones.

    Raises:
        ValueError: `text` isn't a string, or is empty.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"notify: the text is {text!r}: it must be a text that isn't empty")
    with _lock:
        if len(_waiting) < MAX_WAITING:
            _waiting[one_line(text)] = None


def take_messages() -> list[str]:
    """Return and remove the messages since the last call, to be sent with an answer to this process's service."""
    if not _waiting:
        return []
    with _lock:
        taken = list(_waiting)
        _waiting.clear()
    return taken


def ignore(messages: Iterable[str]) -> None:
    """Drop the given messages of users' code: for processes whose messages nobody reads."""


def one_line(text: str) -> str:
    """Return a text as one line of at most MAX_CHARACTERS, with "?" for characters that UTF-8 can't encode."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}…"


class RecentMessages:
    """Keeps the messages that users' code in a replica's processes sent in the last KEPT_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[str, float] = {}
        """Time of the clock, in seconds, at which each message was last sent; by message."""

    def add(self, messages: Iterable[str]) -> None:
        """Add messages, with the current time as the time at which they were sent."""
        for text in map(one_line, messages):
            if text and (text in self._sent or len(self.current()) < MAX_TOLD):
                self._sent[text] = self._clock()

    def current(self) -> list[str]:
        """Return the messages sent in the last KEPT_SECONDS."""
        begin = self._clock() - KEPT_SECONDS
        self._sent = {text: sent for text, sent in self._sent.items() if sent > begin}
        return list(self._sent)

    def clear(self) -> None:
        """Forget all messages, because their run is over."""
        self._sent = {}
