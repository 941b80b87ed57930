"""Log records over OTLP, each with the ids of the span in which it was made."""

import logging

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource

OWN = "opentelemetry"
"""The exporters' own records: sending them would make more of them."""

_SEVERITIES = {
    logging.DEBUG: (SeverityNumber.DEBUG, "DEBUG"),
    logging.INFO: (SeverityNumber.INFO, "INFO"),
    logging.WARNING: (SeverityNumber.WARN, "WARN"),
    logging.ERROR: (SeverityNumber.ERROR, "ERROR"),
    logging.CRITICAL: (SeverityNumber.FATAL, "FATAL"),
}


class LogExport:
    """Exports what this process logs, besides writing it to standard error."""

    def __init__(self, resource: Resource, insecure: bool | None, timeout: float) -> None:
        """Begin. `insecure` is the exporter's; `timeout` limits one export, in seconds."""
        self._provider = LoggerProvider(resource)
        exporter = OTLPLogExporter(insecure=insecure, timeout=timeout)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._handler = _Handler(self._provider)
        logging.getLogger().addHandler(self._handler)

    def flush(self, milliseconds: int) -> None:
        """Export what is pending."""
        self._provider.force_flush(milliseconds)

    def close(self) -> None:
        """Export what is pending, and end."""
        logging.getLogger().removeHandler(self._handler)
        self._provider.shutdown()


class _Handler(logging.Handler):
    """Hands records to the provider, which sends them from another thread."""

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
    """Return where a record was made, and its exception."""
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
