"""OpenTelemetry set-up of a process."""

import logging
import os
from urllib.parse import urlsplit

from opentelemetry import metrics, trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import Tracer

from relaxd import __version__

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
FLUSH_MILLISECONDS = 2000
"""How long the end of a process may wait for a collector, for traces and for metrics each."""
EXPORT_SECONDS = 5.0
"""How long one export may take; a collector that is away must not hold up the end of the process."""

_log = logging.getLogger(__name__)
_enabled = False


def setup(role: str, replica_id: str) -> bool:
    """Start exporting traces and metrics by OTLP over gRPC when OTEL_EXPORTER_OTLP_ENDPOINT is set.

    The resource is service.name = "relaxd-<role>" and service.instance.id = replica_id. The standard OTEL_* variables
    (OTEL_BSP_SCHEDULE_DELAY, OTEL_METRIC_EXPORT_INTERVAL, OTEL_RESOURCE_ATTRIBUTES ...) are honoured. Call it once per
    process; a second call changes nothing.

    Returns whether anything is exported.
    """
    global _enabled
    endpoint = os.environ.get(ENDPOINT, "").strip()
    if _enabled or not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return _enabled
    # The exporters take a third of a second to import: only who exports pays for them.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {
            "service.name": f"relaxd-{role}",
            "service.namespace": "relaxd",
            "service.instance.id": replica_id,
            "service.version": __version__,
        }
    )
    # Without a scheme the exporter would insist on TLS; a bare host:port means plain, as everywhere in relaxd.
    insecure = True if urlsplit(endpoint).scheme not in ("http", "https") else None
    spans = TracerProvider(resource=resource)
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(insecure=insecure, timeout=EXPORT_SECONDS)))
    trace.set_tracer_provider(spans)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(insecure=insecure, timeout=EXPORT_SECONDS))
    metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=[reader]))
    _enabled = True
    _log.info("exporting traces and metrics of relaxd-%s to %s", role, endpoint)
    return True


def enabled() -> bool:
    """Whether this process exports anything."""
    return _enabled


def tracer() -> Tracer:
    """The tracer of this process; its spans do nothing unless something is exported."""
    return trace.get_tracer("relaxd", __version__)


def meter() -> Meter:
    """The meter of this process. Prefer `record`, which takes names from the table of metrics."""
    return metrics.get_meter("relaxd", __version__)


def flush() -> None:
    """Send what is waiting, for a bounded time, and go on: for a process that may be killed soon."""
    if not _enabled:
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    spans, numbers = trace.get_tracer_provider(), metrics.get_meter_provider()
    if isinstance(spans, TracerProvider):
        spans.force_flush(FLUSH_MILLISECONDS)
    if isinstance(numbers, MeterProvider):
        numbers.force_flush(FLUSH_MILLISECONDS)


def shutdown() -> None:
    """Send what is waiting, for a bounded time, and stop exporting. Does nothing when nothing is exported."""
    global _enabled
    if not _enabled:
        return
    _enabled = False
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    spans, numbers = trace.get_tracer_provider(), metrics.get_meter_provider()
    if isinstance(spans, TracerProvider):
        spans.force_flush(FLUSH_MILLISECONDS)
        spans.shutdown()
    if isinstance(numbers, MeterProvider):
        numbers.shutdown(FLUSH_MILLISECONDS)
