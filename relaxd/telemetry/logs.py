"""Logging: records on standard error, as text or, with RELAXD_LOG_FORMAT=json, as JSON. Control characters are escaped.

Lines of traced work end with the ids of its trace and span. setup.py sends the records to a collector, too.
"""

import json
import logging
import os
import re
import sys
import time
import traceback
from types import TracebackType

from opentelemetry import trace

INDENT = "    "
"""Indentation of the second and later lines of a log record, so that no message can imitate another record."""


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def _time(self, record: logging.LogRecord) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"

    def _ids(self) -> dict[str, str]:
        """Return the current span's trace_id and span_id, in hexadecimal; {} outside of a span."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return {}
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


class TextFormatter(_Formatter):
    """Formats log records as text: `2026-01-01T12:00:00.000Z INFO reward-3f9a message`.

    Within a span, `trace_id=... span_id=...` follows. Further lines of a message and a traceback are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as text, without a final line feed."""
        ids = "".join(f" {name}={value}" for name, value in self._ids().items())
        text = f"{record.levelname} {self.service} {record.getMessage()}{ids}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return f"{self._time(record)} {escape_lines(text, INDENT)}"


class JsonFormatter(_Formatter):
    """Formats a log record as a JSON object on one line: time, level, service, logger, message, and trace_id, span_id
    and exception, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line of JSON, without a line feed."""
        entry = {
            "time": self._time(record),
            "level": record.levelname,
            "service": self.service,
            "logger": record.name,
            "message": record.getMessage(),
            **self._ids(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return escape(json.dumps(entry, ensure_ascii=False))


def _print_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print the traceback of an exception that ends the process, with all lines but the first indented."""
    print(escape_lines("".join(traceback.format_exception(kind, error, where)).rstrip(), INDENT), file=sys.stderr)


def setup_logging(service: str, level: str = "info") -> None:
    """Send log records of at least `level` (debug, info, warning, error) to standard error.

    `service` is shown in each line: the replica id, with the child's name in a child process.
    """
    json_lines = os.environ.get("RELAXD_LOG_FORMAT", "").lower() == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if json_lines else TextFormatter(service))
    sys.excepthook = _print_uncaught
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Exporters log every failed attempt, which would flood the log while the collector is down (setup.py).
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)


_DANGEROUS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""Pattern of characters that logs escape: control characters (ESC begins terminal commands), line separators, direction
marks, and lone surrogates."""
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str, keep: str = "") -> str:
    r"""Return a text with control characters escaped as in JSON, such as `\n` and `\u001b`, except those in `keep`."""

    def _escaped(match: re.Match[str]) -> str:
        found = match[0]
        return found if found in keep else _NAMES.get(found) or f"\\u{ord(found):04x}"

    return _DANGEROUS.sub(_escaped, text)


def escape_lines(text: str, indent: str = "") -> str:
    """Return a text with control characters escaped, except line feeds and tabs. Lines after the first are indented by
    `indent`."""
    return escape(text, keep="\n\t").replace("\n", f"\n{indent}")
