"""Log files of services: their newest lines, with the lines of several services sorted by time."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relaxd.telemetry.logs import INDENT

TAIL_BYTES = 4 << 20
"""Number of bytes at the end of a log, at most, from which the last lines are taken at the first read."""
STAMP = re.compile(r'(?:\{"time": ")?(\d{4}-\d\d-\d\dT[\d:.]+Z)(?:(?:", "level": "| )([A-Z]+))?')
"""Matches the time and the level at the beginning of a log record."""
REDIS = re.compile(r"\d+:[A-Z] [^*#]{20,24} ([.*-]) ")
"""Matches the beginning of a Redis log line that is not a warning."""
USUAL = ("DEBUG", "INFO")


@dataclass(frozen=True)
class LogLine:
    """One line of a service's log."""

    service: str
    time: str
    """Time of the line, such as 2026-01-01T12:00:00.000Z. A line without a time, as in a traceback, gets the time of
    the previous line, or "" if no line before has a time."""
    is_problem: bool
    """True for a warning, an error, and output without the logger, such as the cause of a service's end."""
    text: str


class LogTail:
    """Reads a service's log file piece by piece: each read returns the lines written since the last one."""

    def __init__(self, path: Path, max_bytes: int = TAIL_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._position: int | None = None

    def read(self, lines: int = 0) -> list[str]:
        """Return the complete lines since the last call; the first call returns the last `lines` lines, 0 for all."""
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            if self._position is None and lines:
                self._position = max(0, size - self._max_bytes)
            if self._position is None or self._position > size:  # the first time, or its services were started again
                self._position = 0
            file.seek(self._position)
            text, end, _ = file.read().rpartition(b"\n")
            self._position += len(text) + len(end)
        return text.decode(errors="replace").split("\n")[-lines:] if text else []


def log_paths(folder: Path, service: str = "") -> list[Path]:
    """Return the paths of the log files of a service, given by name or role; "": of all services."""
    paths = sorted(folder.glob("*.log"))
    found = [path for path in paths if service in ("", path.stem)]
    return found or [path for path in paths if path.stem.startswith(f"{service}-")]


def by_time(tails: Sequence[LogTail], texts: Sequence[Sequence[str]]) -> list[LogLine]:
    """Merge new lines of several logs in the order of their times. `texts`: the lines read from each of `tails`."""
    lines = [line for tail, text in zip(tails, texts, strict=True) for line in _stamped(tail.path.stem, text)]
    return sorted(lines, key=lambda line: line.time)


def _stamped(service: str, lines: Sequence[str]) -> Iterator[LogLine]:
    time, is_problem = "", False
    for line in lines:
        if match := STAMP.match(line):
            time, is_problem = match[1], match[2] not in USUAL
        elif line and not line.startswith(INDENT):  # else it goes on with the record before
            is_problem = REDIS.match(line) is None
        yield LogLine(service, time, is_problem, line)
