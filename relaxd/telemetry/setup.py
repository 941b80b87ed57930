"""Sets up OpenTelemetry in a process: export of traces, metrics and logs, and files with spans."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry import metrics, trace

from relaxd import __version__
from relaxd.telemetry import instruments
from relaxd.telemetry.instruments import enabled

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from relaxd.telemetry.exporters import LogExport, TraceFiles

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
FLUSH_MILLISECONDS = 2000
"""Maximum milliseconds of the final export when a process ends, for traces, metrics and logs each."""
EXPORT_SECONDS = 5.0
"""Maximum seconds of one export to the collector, so that an unavailable collector doesn't delay the process's end."""

FILE_DELAY_MILLISECONDS = 1000
"""Maximum milliseconds from a span's end until it is written to a file in the run's folder."""

_log = logging.getLogger(__name__)
_process = ("process", "process")
"""This process's role and its instance name: the replica id, in a child process followed by "/" and the child's
name."""
_files: "TraceFiles | None" = None
_logs: "LogExport | None" = None


def setup(role: str, replica_id: str, part: str = "") -> bool:
    """Export traces, metrics and logs by OTLP over gRPC if OTEL_EXPORTER_OTLP_ENDPOINT is set.

    The resource is service.name = "relaxd-<role>" and service.instance.id = replica_id, followed by "/" and `part` in a
    child process. The standard OTEL_* variables (OTEL_BSP_SCHEDULE_DELAY, OTEL_METRIC_EXPORT_INTERVAL,
    OTEL_RESOURCE_ATTRIBUTES ...) apply; OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER or OTEL_LOGS_EXPORTER = "none"
    leaves one of the three out. An endpoint that can't be reached is logged once. Call it once per process, after
    setup_logging; further calls do nothing.

    Returns True if anything is exported.
    """
    global _process, _logs
    _process = role, f"{replica_id}/{part}" if part else replica_id
    endpoint = os.environ.get(ENDPOINT, "").strip()
    if instruments.exporting or not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return instruments.exporting
    exported = [what for what in ("traces", "metrics", "logs") if _is_wanted(what)]
    if not exported:
        return False
    # Imported only if needed: the exporters take a third of a second to import.
    from opentelemetry.exporter.otlp.proto.grpc import exporter

    exporter.logger.addFilter(_SaidOnce())
    # Without a scheme the exporter would require TLS; in relaxd a bare host:port means plaintext.
    insecure = True if urlsplit(endpoint).scheme not in ("http", "https") else None
    if "traces" in exported:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        spans = BatchSpanProcessor(OTLPSpanExporter(insecure=insecure, timeout=EXPORT_SECONDS))
        _span_provider().add_span_processor(spans)
    if "metrics" in exported:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        reader = PeriodicExportingMetricReader(OTLPMetricExporter(insecure=insecure, timeout=EXPORT_SECONDS))
        metrics.set_meter_provider(MeterProvider(resource=_resource(), metric_readers=[reader]))
    if "logs" in exported:
        from relaxd.telemetry.exporters import LogExport

        _logs = LogExport(_resource(), insecure, EXPORT_SECONDS)
    instruments.exporting = True
    _log.info("exporting %s of relaxd-%s to %s", ", ".join(exported), role, endpoint)
    return True


def _is_wanted(what: str) -> bool:
    return os.environ.get(f"OTEL_{what.upper()}_EXPORTER", "").strip().lower() != "none"


def write_traces(run_folder: Path | None) -> None:
    """Start to write this process's spans to a file in a run's folder; None: stop writing.

    First waits, for a bounded time, until earlier spans are written.
    """
    global _files
    if _files is None:
        if run_folder is None:
            return
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from relaxd.telemetry.exporters import TraceFiles

        _files = TraceFiles(_process[1])
        processor = BatchSpanProcessor(_files, schedule_delay_millis=FILE_DELAY_MILLISECONDS)
        _span_provider().add_span_processor(processor)
    elif _files.is_open:
        flush()
    _files.open(run_folder)
    instruments.writing = _files.is_open


class _SaidOnce(logging.Filter):
    """Log filter that lets only the first error of OTLP's exporters through, as a warning. They would report an error
    with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if self._said or record.levelno < logging.ERROR:
            return False
        self._said = True
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = f"{record.msg}; exporting is tried again, without saying so"
        return True


def _resource() -> "Resource":
    from opentelemetry.sdk.resources import Resource

    return Resource.create(
        {
            "service.name": f"relaxd-{_process[0]}",
            "service.namespace": "relaxd",
            "service.instance.id": _process[1],
            "service.version": __version__,
        }
    )


def _span_provider() -> "TracerProvider":
    """Return this process's tracer provider, and create it on the first call."""
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from relaxd.telemetry.lightweight_spans import QuickSpan

    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        processor, scope = SynchronousMultiSpanProcessor(), InstrumentationScope("relaxd", __version__)
        provider = TracerProvider(resource=_resource(), active_span_processor=processor)
        trace.set_tracer_provider(provider)
        instruments.open_quick = partial(QuickSpan, processor=processor, scope=scope, resource=provider.resource)
    return provider


def flush() -> None:
    """Export pending spans, metrics and logs, within a bounded time. For processes that may be killed soon."""
    if not enabled():
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    spans, numbers = trace.get_tracer_provider(), metrics.get_meter_provider()
    if isinstance(spans, TracerProvider):
        spans.force_flush(FLUSH_MILLISECONDS)
    if isinstance(numbers, MeterProvider):
        numbers.force_flush(FLUSH_MILLISECONDS)
    if _logs is not None:
        _logs.flush(FLUSH_MILLISECONDS)


def shutdown() -> None:
    """Export pending spans, metrics and logs, within a bounded time, then stop exporting."""
    if not enabled():
        return
    flush()
    instruments.exporting = False
    if _files is not None:
        _files.open(None)
        instruments.writing = False
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    spans, numbers = trace.get_tracer_provider(), metrics.get_meter_provider()
    if isinstance(spans, TracerProvider):
        spans.shutdown()
    if isinstance(numbers, MeterProvider):
        numbers.shutdown(FLUSH_MILLISECONDS)
    if _logs is not None:
        _logs.close()
