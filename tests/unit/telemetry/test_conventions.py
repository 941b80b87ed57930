"""Spans and metrics use the names of OpenTelemetry's semantic conventions, and none that these have given up."""

import logging

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.semconv._incubating.attributes import messaging_attributes, rpc_attributes
from opentelemetry.semconv._incubating.metrics import rpc_metrics
from opentelemetry.semconv.attributes import code_attributes, error_attributes, exception_attributes, server_attributes
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags

from relaxd.telemetry.exporters import attributes_of
from relaxd.telemetry.lightweight_spans import QuickSpan
from relaxd.telemetry.metrics import METRICS
from relaxd.telemetry.spans import RpcMethod, operation_attributes
from tests.kit.boards import make_board

KNOWN = {
    value
    for module in (
        *(messaging_attributes, rpc_attributes, code_attributes),
        *(error_attributes, exception_attributes, server_attributes),
    )
    for name, value in vars(module).items()
    if name.isupper()
}
GIVEN_UP = {"rpc.service", "rpc.system", "rpc.grpc.status_code", "messaging.operation"}


def test_attributes_are_those_of_the_conventions(redis_url: str) -> None:
    error = ValueError("broken")
    record = logging.LogRecord("relaxd", logging.ERROR, __file__, 1, "failed", (), (ValueError, error, None))
    used = {
        *RpcMethod("/relaxd.v1.Reward/Score", "127.0.0.1:50051").outcome("NOT_FOUND", error=True),
        *operation_attributes("commit", "settle", "rollout", "g1"),
        *make_board(redis_url).client_attributes("rollout-1"),
        *attributes_of(record),
        *(name for metric in METRICS.values() for name in metric.attributes),
    }
    ours = {name for name in used if name.startswith("relaxd.")}
    assert used - ours <= KNOWN - GIVEN_UP
    assert {metric.name for metric in METRICS.values() if metric.of_convention} == {
        rpc_metrics.RPC_SERVER_CALL_DURATION
    }


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("127.0.0.1:50051", {"server.address": "127.0.0.1", "server.port": 50051}),
        ("[::1]:50051", {"server.address": "::1", "server.port": 50051}),
        ("dns:///coordinator:50050", {"server.address": "coordinator", "server.port": 50050}),
        ("unix:/tmp/relaxd-1/socket", {"server.address": "/tmp/relaxd-1/socket"}),
        ("coordinator", {"server.address": "coordinator"}),
        ("", {}),
    ],
)
def test_the_address_of_a_server(target: str, address: dict[str, str | int]) -> None:
    method = RpcMethod("/relaxd.v1.Reward/Score", target)
    assert method.name == "relaxd.v1.Reward/Score"
    assert method.attributes == {"rpc.system.name": "grpc", "rpc.method": "relaxd.v1.Reward/Score", **address}


class Kept(SpanProcessor):
    """Keeps what ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def test_a_quick_span_can_do_what_spans_can() -> None:
    kept, shared = Kept(), {"rpc.method": "a/B"}
    parent = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(1))
    sent_to = {"processor": kept, "scope": InstrumentationScope("relaxd"), "resource": None}
    span = QuickSpan("a/B", parent, SpanKind.SERVER, shared, **sent_to)
    assert span.is_recording()
    span.set_attribute("relaxd.request_id", "r1")
    span.add_event("began")
    with pytest.raises(ValueError, match="broken"), trace.use_span(span, end_on_exit=True):
        raise ValueError("broken")
    assert not span.is_recording()
    assert kept.spans == [span]
    assert (span.context.trace_id, span.parent) == (7, parent)
    assert span.attributes == {"rpc.method": "a/B", "relaxd.request_id": "r1"}
    assert shared == {"rpc.method": "a/B"}, "all calls of the method share them"
    assert [event.name for event in span.events] == ["began", "exception"]
    assert span.events[1].attributes == {"exception.type": "ValueError", "exception.message": "broken"}
    assert span.status.status_code is StatusCode.ERROR
    assert span.start_time <= span.end_time
