"""Logging: one line per record on standard error, as text or, with RELAXD_LOG_FORMAT=json, as JSON.

Lines of traced work end with the ids of its trace and span. setup.py sends the records to a collector, too.
"""

import json
import logging
import os
import sys
import time

from opentelemetry import trace


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def _time(self, record: logging.LogRecord) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"

    def _ids(self) -> dict[str, str]:
        """Return the ids of the current trace and span; none outside of one."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return {}
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


class TextFormatter(_Formatter):
    """`2026-01-01T12:00:00.000Z INFO reward-3f9a message`, then `trace_id=... span_id=...` in a span.

    A traceback follows on separate lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as text."""
        ids = "".join(f" {name}={value}" for name, value in self._ids().items())
        line = f"{self._time(record)} {record.levelname} {self.service} {record.getMessage()}{ids}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_Formatter):
    """One JSON object per line: time, level, service, logger, message, and trace_id, span_id, exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as JSON."""
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
        return json.dumps(entry, ensure_ascii=False)


def setup_logging(service: str, level: str = "info") -> None:
    """Send log records of at least `level` (debug, info, warning, error) to standard error.

    `service` is shown in each line: the replica id, with the child's name in a child process.
    """
    json_lines = os.environ.get("RELAXD_LOG_FORMAT", "").lower() == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if json_lines else TextFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Exporters log every failed attempt, which would flood the log while the collector is down (setup.py).
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
