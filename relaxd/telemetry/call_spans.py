"""Spans and metrics of gRPC calls, by OpenTelemetry's conventions for RPC.

Only calls within a trace have spans: heartbeats and the like would bury the groups' traces.
"""

import asyncio
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import attach, detach
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from relaxd.telemetry.instruments import open_quick_span
from relaxd.telemetry.metrics import record
from relaxd.telemetry.spans import remote_context

FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that are a server's errors. The others are answers for the caller to handle."""


class RpcMethod:
    """Attributes that all calls of a method share."""

    def __init__(self, path: str, target: str = "") -> None:
        """`path`: "/PACKAGE.SERVICE/METHOD"; `target`: name of the called server in gRPC."""
        self.name = path.removeprefix("/")
        self.attributes: Mapping[str, AttributeValue] = {
            "rpc.system.name": "grpc",
            "rpc.method": self.name,
            **_address(target),
        }
        self._outcomes: dict[tuple[str, bool], dict[str, AttributeValue]] = {}

    def outcome(self, status: str, error: bool) -> dict[str, AttributeValue]:
        """Return the attributes of a call that ended with a gRPC status; not to be changed."""
        found = self._outcomes.get((status, error))
        if found is None:
            failed = {"error.type": status} if error else {}
            found = {**self.attributes, "rpc.response.status_code": status, **failed}
            self._outcomes[status, error] = found
        return found


def open_client_span(method: RpcMethod) -> Span | None:
    """Open the span of a call to a server; None if the current span isn't recorded."""
    current = trace.get_current_span()
    if not current.is_recording():
        return None
    return open_quick_span(method.name, current.get_span_context(), SpanKind.CLIENT, method.attributes)


def end_client_span(span: Span, method: RpcMethod, status: str, ended_at: int | None = None) -> None:
    """End a span with the call's gRPC status, at `ended_at` (nanoseconds of Unix time) or now."""
    _end(span, method.outcome(status, status != "OK"), ended_at)


class ServedCall:
    """A call that a server answers: records its duration and, if its caller is traced, its span."""

    def __init__(self, method: RpcMethod, carrier: Mapping[str, str]) -> None:
        """Begin the span, which is the current one until `end`."""
        self.status = "OK"
        """The name of its gRPC status."""
        self.in_other_task = False
        """True if the call ends in another task, and so in another context, than it began in."""
        self._method = method
        self._begun = time.perf_counter()
        self._span: Span | None = None
        self._token = None
        parent = remote_context(carrier)
        if parent.is_valid:
            self._span = open_quick_span(method.name, parent, SpanKind.SERVER, method.attributes)
            current = NonRecordingSpan(parent) if self._span is None else self._span
            self._token = attach(trace.set_span_in_context(current))

    def end(self) -> None:
        """End the span and record the duration once the response is on its way, so that the caller doesn't wait for
        it."""
        ended, ended_at = time.perf_counter(), time.time_ns()
        asyncio.get_running_loop().call_soon(self._finish, ended - self._begun, ended_at)
        if self._token is not None and not self.in_other_task:
            detach(self._token)

    def _finish(self, seconds: float, ended_at: int) -> None:
        outcome = self._method.outcome(self.status, self.status in FAULTS)
        record("rpc.server.call.duration", seconds, outcome, self._span)
        if self._span is not None:
            _end(self._span, outcome, ended_at)


def _end(span: Span, outcome: dict[str, AttributeValue], ended_at: int | None) -> None:
    span.set_attributes(outcome)
    if "error.type" in outcome:
        span.set_status(StatusCode.ERROR, str(outcome["error.type"]))
    span.end(ended_at)


def _address(target: str) -> dict[str, AttributeValue]:
    """Return the attributes of a gRPC target: host:port, dns:///host:port, or unix:/path."""
    if target.startswith("unix:"):
        return {"server.address": target.removeprefix("unix:")}
    host, colon, port = target.rpartition("/")[2].rpartition(":")
    if colon and port.isdecimal():
        return {"server.address": host.strip("[]"), "server.port": int(port)}
    return {"server.address": target} if target else {}
