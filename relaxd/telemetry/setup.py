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
"""Limit of the final export at the end of a process, for traces and metrics each."""
EXPORT_SECONDS = 5.0
"""Limit of one export, so that a collector that is down does not delay the end of the process."""

_log = logging.getLogger(__name__)
_enabled = False


def setup(role: str, replica_id: str) -> bool:
    """Export traces and metrics by OTLP over gRPC if OTEL_EXPORTER_OTLP_ENDPOINT is set.

    The resource is service.name = "relaxd-<role>" and service.instance.id = replica_id. The standard OTEL_* variables
    (OTEL_BSP_SCHEDULE_DELAY, OTEL_METRIC_EXPORT_INTERVAL, OTEL_RESOURCE_ATTRIBUTES ...) apply. Call it once per
    process; further calls do nothing.

    Returns True if anything is exported.
    """
    global _enabled
    endpoint = os.environ.get(ENDPOINT, "").strip()
    if _enabled or not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return _enabled
    # Imported only if needed: the exporters take a third of a second to import.
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
    # Without a scheme the exporter would require TLS; in relaxd a bare host:port means plaintext.
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
    """Return True if this process exports anything."""
    return _enabled


def tracer() -> Tracer:
    """Return the tracer of this process; its spans do nothing unless something is exported."""
    return trace.get_tracer("relaxd", __version__)


def meter() -> Meter:
    """Return the meter of this process. Prefer `record`, which uses the table of metrics."""
    return metrics.get_meter("relaxd", __version__)


def flush() -> None:
    """Export pending data, for a bounded time, in a process that may be killed soon."""
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
    """Export pending data, for a bounded time, and stop exporting."""
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
