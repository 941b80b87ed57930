"""Carriers are read as OpenTelemetry's own propagator reads them."""

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from relaxd import telemetry
from tests.kit.cases import each

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@each(
    "carrier",
    [
        {"traceparent": f"00-{TRACE}-{SPAN}-01"},
        {"traceparent": f"00-{TRACE}-{SPAN}-00"},
        {"traceparent": f"00-{TRACE}-{SPAN}-03", "tracestate": "one=1,other=2"},
        {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "one=1," + "x" * 600},
        {"traceparent": f"01-{TRACE}-{SPAN}-01-later"},
        {"traceparent": f"00-{TRACE}-{SPAN}-01-later"},
        {"traceparent": f"ff-{TRACE}-{SPAN}-01"},
        {"traceparent": f"00-{TRACE.upper()}-{SPAN}-01"},
        {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
        {"traceparent": f"00-{TRACE}-{'0' * 16}-01"},
        {"traceparent": f"00-{TRACE}-{SPAN}"},
        {"traceparent": f"01-{TRACE}-{SPAN}-01-" + "x" * 600},
        {"traceparent": "trace-of-a"},
        {"traceparent": ""},
        {"tracestate": "one=1"},
        {},
    ],
)
def test_a_carrier_is_read_as_the_propagator_reads_it(carrier: dict[str, str]) -> None:
    expected = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier, Context())).get_span_context()
    found = telemetry.remote_context(carrier)
    assert found.is_valid == expected.is_valid
    if expected.is_valid:
        assert found == expected
        assert found.is_remote
        injected = telemetry.inject(trace.NonRecordingSpan(found))
        written: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(written, trace.set_span_in_context(trace.NonRecordingSpan(expected)))
        assert injected == written
