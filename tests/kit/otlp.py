"""A real OTLP receiver over gRPC: what a collector would get, for tests to look at."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.kit.waiting import PATIENCE


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire; ids are hex, parent_id is "" for a root, links are (trace_id, span_id)."""

    name: str
    kind: str
    """Such as CLIENT."""
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    error: bool
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ReceivedPoint:
    """One data point of a metric: its value, or a histogram's sum and count."""

    name: str
    unit: str
    service: str
    value: float
    count: int
    attributes: dict[str, Any]
    exemplars: tuple[tuple[str, str], ...]
    """(trace_id, span_id) of a histogram's exemplars."""


@dataclass(frozen=True)
class ReceivedLog:
    """One log record; the ids are hex, "" outside of a span."""

    body: str
    severity: str
    logger: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    attributes: dict[str, Any]


def _value(value: AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans, metric points and log records from any number of processes.

    `endpoint` goes to OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._points: list[ReceivedPoint] = []
        self._logs: list[ReceivedLog] = []
        self.exports: list[bytes] = []
        """Every request as it came."""
        self._arrived = threading.Condition()

    def environment(self) -> dict[str, str]:
        """Variables that make a process export here, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_BLRP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }

    def spans(self) -> list[ReceivedSpan]:
        """Every span so far."""
        with self._arrived:
            return list(self._spans)

    def points(self, name: str = "") -> list[ReceivedPoint]:
        """Every point so far, or those of one metric; the newest last."""
        with self._arrived:
            return [point for point in self._points if not name or point.name == name]

    def logs(self) -> list[ReceivedLog]:
        """Every log record so far."""
        with self._arrived:
            return list(self._logs)

    def wait_for(self, condition: Callable[["OtlpReceiver"], Any], timeout: float = 60.0) -> Any:
        """Wait until condition(self) is true and return it; fails with what came within PATIENCE times `timeout`."""
        timeout *= PATIENCE
        with self._arrived:
            met = self._arrived.wait_for(lambda: condition(self), timeout)
        assert met, f"not received within {timeout:g} s; spans: {[(s.service, s.name) for s in self.spans()]}"
        return met

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        spans = [
            ReceivedSpan(
                name=span.name,
                kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                service=resource["service.name"],
                instance=resource.get("service.instance.id", ""),
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                start=span.start_time_unix_nano,
                end=span.end_time_unix_nano,
                error=span.status.code == 2,
                attributes=_attributes(span.attributes),
                links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            )
            for group in request.resource_spans
            for resource in [_attributes(group.resource.attributes)]
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self.exports.append(request.SerializeToString())
            self._spans += spans
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def add_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        """Keep the points of one export."""
        points = []
        for group in request.resource_metrics:
            service = _attributes(group.resource.attributes)["service.name"]
            for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    histogram = hasattr(point, "bucket_counts")
                    value = point.sum if histogram else getattr(point, point.WhichOneof("value"))
                    count = point.count if histogram else 1
                    attributes = _attributes(point.attributes)
                    exemplars = tuple(
                        (exemplar.trace_id.hex(), exemplar.span_id.hex())
                        for exemplar in (point.exemplars if histogram else ())
                    )
                    points.append(ReceivedPoint(metric.name, metric.unit, service, value, count, attributes, exemplars))
        with self._arrived:
            self.exports.append(request.SerializeToString())
            self._points += points
            self._arrived.notify_all()

    def add_logs(self, request: logs_service_pb2.ExportLogsServiceRequest) -> None:
        """Keep the records of one export."""
        records = [
            ReceivedLog(
                body=record.body.string_value,
                severity=record.severity_text,
                logger=scope.scope.name,
                service=resource["service.name"],
                instance=resource["service.instance.id"],
                trace_id=record.trace_id.hex().strip("0") and record.trace_id.hex(),
                span_id=record.span_id.hex().strip("0") and record.span_id.hex(),
                attributes=_attributes(record.attributes),
            )
            for group in request.resource_logs
            for resource in [_attributes(group.resource.attributes)]
            for scope in group.scope_logs
            for record in scope.log_records
        ]
        with self._arrived:
            self.exports.append(request.SerializeToString())
            self._logs += records
            self._arrived.notify_all()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any) -> Any:
        self._receiver.add_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: logs_service_pb2.ExportLogsServiceRequest, context: Any) -> Any:
        self._receiver.add_logs(request)
        return logs_service_pb2.ExportLogsServiceResponse()


@contextmanager
def otlp_receiver(host: str = "127.0.0.1") -> Iterator[OtlpReceiver]:
    """A receiver that listens on a free port of `host`, an address of this machine, while the block runs."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(receiver), server)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(receiver), server)
    receiver.endpoint = f"http://{host}:{server.add_insecure_port(f'{host}:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0.2).wait()
