"""Exporters: spans in files of a run's folder, in OTLP's JSON format, and log records over OTLP."""

import base64
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from relaxd.run_folder import TRACES, append_whole
from relaxd.telemetry.metrics import record

IDS = ("traceId", "spanId", "parentSpanId")
"""Names of span fields whose bytes OTLP's JSON format writes in hexadecimal, unlike protobuf's JSON (base64)."""

_log = logging.getLogger(__name__)


class TraceFiles(SpanExporter):
    """Span exporter that appends this process's spans to a file in the run's folder; without a run it drops spans."""

    def __init__(self, process: str) -> None:
        """Drop spans until `open` is called. `process` begins the file's name: a replica id, or "ID/PART" for a child
        process."""
        self._name = f"{process.replace('/', '-')}-{os.getpid()}.jsonl"
        self._path: Path | None = None
        self._dropped = 0
        """Number of spans dropped because of write errors since spans were last written."""

    @property
    def is_open(self) -> bool:
        """True if spans are written to a file, False if they are dropped."""
        return self._path is not None

    def open(self, run_folder: Path | None) -> None:
        """Write later spans to a file in the folder of a run; None: drop them."""
        if run_folder is not None and not run_folder.is_dir():
            _log.warning(
                "no traces of this process are written: the run's folder %s is not on this machine", run_folder
            )
            run_folder = None
        self._path = None if run_folder is None else run_folder / TRACES / self._name

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append spans to the file, all or none of them. On a write error they are dropped and counted: no work waits
        for traces."""
        path = self._path
        if path is None:
            return SpanExportResult.SUCCESS
        line = json.dumps(_with_hex_ids(MessageToDict(encode_spans(spans), use_integers_for_enums=True))) + "\n"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab", buffering=0) as file:
                append_whole(file, line.encode())
        except OSError as error:
            if not self._dropped:
                _log.warning("spans are dropped: %s", error)
            self._dropped += len(spans)
            record("traces.dropped_spans", len(spans))
            return SpanExportResult.FAILURE
        if self._dropped:
            _log.warning("spans are written again; %d were dropped", self._dropped)
            self._dropped = 0
        return SpanExportResult.SUCCESS


def _with_hex_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_hex_ids(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {name: base64.b64decode(part).hex() if name in IDS else _with_hex_ids(part) for name, part in value.items()}


OWN = "opentelemetry"
"""Name of OpenTelemetry's parent logger, whose records aren't exported: exporting them would create more records."""

_SEVERITIES = {
    logging.DEBUG: (SeverityNumber.DEBUG, "DEBUG"),
    logging.INFO: (SeverityNumber.INFO, "INFO"),
    logging.WARNING: (SeverityNumber.WARN, "WARN"),
    logging.ERROR: (SeverityNumber.ERROR, "ERROR"),
    logging.CRITICAL: (SeverityNumber.FATAL, "FATAL"),
}


class LogExport:
    """Exports this process's log records by OTLP, in addition to those on standard error."""

    def __init__(self, resource: Resource, insecure: bool | None, timeout: float) -> None:
        """Start to export log records. `insecure` is passed to OTLPLogExporter; `timeout` limits each export, in
        seconds."""
        self._provider = LoggerProvider(resource)
        exporter = OTLPLogExporter(insecure=insecure, timeout=timeout)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._handler = _Handler(self._provider)
        logging.getLogger().addHandler(self._handler)

    def flush(self, milliseconds: int) -> None:
        """Export pending log records, within `milliseconds`."""
        self._provider.force_flush(milliseconds)

    def close(self) -> None:
        """Export pending log records, and stop exporting."""
        logging.getLogger().removeHandler(self._handler)
        self._provider.shutdown()


class _Handler(logging.Handler):
    """Logging handler that hands log records to OpenTelemetry's provider, which sends them from another thread."""

    def __init__(self, provider: LoggerProvider) -> None:
        super().__init__()
        self._provider = provider
        self.addFilter(lambda record: record.name.partition(".")[0] != OWN)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            body = record.getMessage()
        except Exception:  # as logging does: a wrong format string must not end its caller
            self.handleError(record)
            return
        number, text = _SEVERITIES.get(record.levelno, (SeverityNumber.UNSPECIFIED, record.levelname))
        exported = LogRecord(
            timestamp=int(record.created * 1e9),
            severity_number=number,
            severity_text=text,
            body=body,
            attributes=attributes_of(record),
        )
        self._provider.get_logger(record.name).emit(exported)


def attributes_of(record: logging.LogRecord) -> dict[str, str | int]:
    """Return the OTLP attributes of a log record: its file, function and line, and its exception, if any."""
    found: dict[str, str | int] = {
        "code.file.path": record.pathname,
        "code.function.name": record.funcName or "",
        "code.line.number": record.lineno,
    }
    if record.exc_info and record.exc_info[0] is not None:
        kind, error, _ = record.exc_info
        found |= {
            "exception.type": kind.__qualname__,
            "exception.message": str(error),
            "exception.stacktrace": logging.Formatter().formatException(record.exc_info),
        }
    return found
