"""Spans: one trace per group, from its prompt to its step, across services and through Redis; spans of gRPC calls.

The span that creates the group is the root. The group carries its context, and the spans in which stages
work on it are its children. The carrier of an untraced group is empty. Steps have separate traces, to which the
trainer's spans link. docs/traces.md has a table of all spans.

A group is a message, and a stage the destination that it is sent to. Publishing, taking and settling groups are
operations on batches, which link to the spans that created their groups. A batch without a traced group has no span.

Spans and metrics of gRPC calls follow OpenTelemetry's conventions for RPC. Only calls within a trace have spans:
heartbeats and the like would bury the groups' traces.
"""

import asyncio
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    INVALID_SPAN,
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    format_trace_id,
)
from opentelemetry.util.types import Attributes, AttributeValue

from relaxd.telemetry.instruments import enabled, open_quick_span, tracer
from relaxd.telemetry.metrics import record

KNOWN = 4096
"""Number of parsed trace contexts to cache; every operation on a group reads the group's carrier."""
MOST_LETTERS = 512
"""Maximum characters of a traceparent or tracestate header; longer headers are ignored."""

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:(?<!^00.{53})-.*)?")
"""Pattern of a traceparent header (W3C Trace Context). Accepts what opentelemetry.trace.propagation.tracecontext does,
but is faster."""


def inject(span: Span | None = None) -> dict[str, str]:
    """Return the carrier of a span, by default the current one: its context as headers (traceparent, tracestate).

    Returns {} if there is no such span.
    """
    context = (trace.get_current_span() if span is None else span).get_span_context()
    if not context.is_valid:
        return {}
    carrier = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        carrier["tracestate"] = context.trace_state.to_header()
    return carrier


def remote_context(carrier: Mapping[str, str]) -> SpanContext:
    """Return the span context in a carrier (trace headers); an invalid context if there is none."""
    parent, state = carrier.get("traceparent"), carrier.get("tracestate", "")
    if not parent or len(parent) > MOST_LETTERS:
        return INVALID_SPAN_CONTEXT
    return _read(parent, state if len(state) <= MOST_LETTERS else "")


def trace_id(carrier: Mapping[str, str]) -> str:
    """Return the trace id in a carrier (trace headers), as 32 hexadecimal digits; "" if there is none."""
    context = remote_context(carrier)
    return format_trace_id(context.trace_id) if context.is_valid else ""


def link_from(carrier: Mapping[str, str]) -> Link | None:
    """Return a link to the span whose context a carrier (trace headers) has; None if there is none."""
    context = remote_context(carrier)
    return Link(context) if context.is_valid else None


@lru_cache(maxsize=KNOWN)
def _read(parent: str, state: str) -> SpanContext:
    found = _PARENT.fullmatch(parent)
    if found is None:
        return INVALID_SPAN_CONTEXT
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return SpanContext(
        trace_id, span_id, True, TraceFlags(flags), TraceState.from_header([state]) if state else TraceState()
    )


SYSTEM = "redis"

OperationType = Literal["create", "send", "receive", "process", "settle"]


def operation_attributes(
    name: str, kind: OperationType, stage: str, message: str = "", more: Attributes = None
) -> dict[str, AttributeValue]:
    """Return the span attributes of an operation on groups in a stage, by OpenTelemetry's conventions for messaging.

    `message` is the group's id if the operation is on a single group.
    """
    found: dict[str, AttributeValue] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": stage,
        **(more or {}),
    }
    return found | {"messaging.message.id": message, "relaxd.group_id": message} if message else found


class BatchSpan:
    """Context manager that records its `with` block as a span: an operation on a batch of groups.

    Records no span if none of the groups is traced. The span is a child of the current span if that is recorded, or
    else begins a new trace.
    """

    def __init__(
        self,
        name: str,
        kind: OperationType,
        stage: str,
        carriers: Iterable[Mapping[str, str]],
        attributes: Attributes = None,
    ) -> None:
        """`name` is the operation, such as "publish" or "commit"; `carriers` are the trace headers of its groups."""
        self._name, self._kind, self._stage = name, kind, stage
        self._carriers, self._attributes = carriers, attributes

    def __enter__(self) -> None:
        self._started_at = time.time_ns()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        record_batch(
            self._name, self._kind, self._stage, self._carriers, self._started_at, self._attributes, error=error
        )


def record_batch(
    name: str,
    kind: OperationType,
    stage: str,
    carriers: Iterable[Mapping[str, str]],
    started_at: int,
    attributes: Attributes = None,
    *,
    error: BaseException | None = None,
) -> None:
    """Record the span of an operation on a batch of groups that has just ended, as `BatchSpan` does.

    `started_at` is the operation's start, in nanoseconds of Unix time.
    """
    if not enabled() or not (links := [link for link in map(link_from, carriers) if link is not None]):
        return
    current = trace.get_current_span()
    parent = current.get_span_context() if current.is_recording() else None
    count = {"messaging.batch.message_count": len(links)}
    values = operation_attributes(name, kind, stage, more={**(attributes or {}), **count})
    span = open_quick_span(f"{name} {stage}", parent, SpanKind.CLIENT, values, links, started_at)
    if span is None:
        return
    if error is not None:
        span.record_exception(error)
        span.set_status(trace.StatusCode.ERROR, str(error))
        span.set_attribute("error.type", type(error).__qualname__)
    span.end()


@contextmanager
def create_span(
    group_id: str, stage: str, sample_ratio: float = 1.0, attributes: Attributes = None
) -> Iterator[dict[str, str]]:
    """Open the root span of a group's trace for the time until the group is published.

    Yields the carrier (trace headers) to publish with the group; {} if the group is not traced. The span doesn't become
    the current span, because several groups are published together.

    Args:
        group_id: the group.
        stage: the first stage, to which the group is published.
        sample_ratio: the share of groups to trace, from 0 to 1. Whether a group is traced depends only on its id, so
            that a repeated publication decides the same.
        attributes: further attributes.
    """
    if not enabled() or zlib.crc32(group_id.encode()) >= sample_ratio * 2**32:
        yield {}
        return
    values = operation_attributes("create", "create", stage, group_id, attributes)
    span = tracer().start_span(f"create {stage}", Context(), SpanKind.PRODUCER, values)
    try:
        yield inject(span)
    except Exception as error:
        span.record_exception(error)
        span.set_status(trace.StatusCode.ERROR, str(error))
        raise
    finally:
        span.end()


def open_stage_span(
    stage: str,
    group_id: str,
    carrier: Mapping[str, str],
    *,
    waited_seconds: float | None = None,
    started_at: int | None = None,
    attributes: Attributes = None,
    links: Iterable[Mapping[str, str]] = (),
) -> Span:
    """Start the span of a stage's work on one group; the caller ends it, in any thread.

    Args:
        stage: the stage; the span is called "process STAGE".
        group_id: the group.
        carrier: the carrier from create_span. If it is empty, the span does nothing.
        waited_seconds: time that the group waited for the stage: an attribute, and a span "wait" that ends where
            this one starts.
        started_at: start of the work in microseconds of Unix time; None: now.
        attributes: further attributes.
        links: carriers of spans to link to, such as the step's.
    """
    parent = remote_context(carrier)
    if not parent.is_valid:
        return INVALID_SPAN
    more = {**(attributes or {}), "relaxd.stage": stage}
    start = time.time_ns() if started_at is None else started_at * 1000
    if waited_seconds is not None:
        more["relaxd.wait_seconds"] = waited_seconds
        enqueued = start - int(waited_seconds * 1e9)
        wait = open_quick_span("wait", parent, SpanKind.INTERNAL, {"relaxd.stage": stage}, start_time=enqueued)
        if wait is not None:
            wait.end(start)
    span = open_quick_span(
        f"process {stage}",
        parent,
        SpanKind.CONSUMER,
        operation_attributes("process", "process", stage, group_id, more),
        [link for link in map(link_from, links) if link is not None],
        start,
    )
    return INVALID_SPAN if span is None else span


@contextmanager
def part_span(name: str, attributes: Mapping[str, AttributeValue]) -> Iterator[Span]:
    """Open a child of the current span, and make the child current. Does nothing if the current span isn't recorded."""
    current = trace.get_current_span()
    span = None
    if current.is_recording():
        span = open_quick_span(name, current.get_span_context(), SpanKind.INTERNAL, attributes)
    if span is None:
        yield INVALID_SPAN
        return
    with trace.use_span(span, end_on_exit=True):
        yield span


@contextmanager
def root_span(name: str, *, attributes: Attributes = None) -> Iterator[Span]:
    """Open the first span of a new trace, such as a step's or a weight synchronisation's, and make it current."""
    if not enabled():
        yield INVALID_SPAN
        return
    with tracer().start_as_current_span(name, Context(), attributes=attributes) as span:
        yield span


FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Names of the gRPC statuses that count as errors of the server. Other statuses are answers that the caller handles."""


class RpcMethod:
    """A gRPC method, with the span attributes that all its calls share."""

    def __init__(self, path: str, target: str = "") -> None:
        """`path` is "/PACKAGE.SERVICE/METHOD"; `target` is the called server, as given to gRPC, or ""."""
        self.name = path.removeprefix("/")
        self.attributes: Mapping[str, AttributeValue] = {
            "rpc.system.name": "grpc",
            "rpc.method": self.name,
            **_address(target),
        }
        self._outcomes: dict[tuple[str, bool], dict[str, AttributeValue]] = {}

    def outcome(self, status: str, error: bool) -> dict[str, AttributeValue]:
        """Return the span attributes of a call that ended with a gRPC status. Cached: callers must not change them."""
        found = self._outcomes.get((status, error))
        if found is None:
            failed = {"error.type": status} if error else {}
            found = {**self.attributes, "rpc.response.status_code": status, **failed}
            self._outcomes[status, error] = found
        return found


def open_client_span(method: RpcMethod) -> Span | None:
    """Open a client's span of a gRPC call; return None if the current span isn't recorded."""
    current = trace.get_current_span()
    if not current.is_recording():
        return None
    return open_quick_span(method.name, current.get_span_context(), SpanKind.CLIENT, method.attributes)


def end_client_span(span: Span, method: RpcMethod, status: str, ended_at: int | None = None) -> None:
    """End a client's span of a gRPC call, with the call's status name, at `ended_at` (nanoseconds of Unix time) or
    now."""
    _end(span, method.outcome(status, status != "OK"), ended_at)


class ServedCall:
    """A gRPC call in a server: records the call's duration and, if the caller is traced, a span."""

    def __init__(self, method: RpcMethod, carrier: Mapping[str, str]) -> None:
        """Start to measure a call. If `carrier` has trace headers, open a span, which is current until `end`."""
        self.status = "OK"
        """Name of the gRPC status with which the call ends, such as "OK"."""
        self.in_other_task = False
        """True if the call ends in another asyncio task than it began in, and so in another context."""
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
        """End the span and record the call's duration, in the event loop's next round, so that the response is sent
        first."""
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
    """Return the span attributes that name a server, from its gRPC target: host:port, dns:///host:port, or
    unix:/path."""
    if target.startswith("unix:"):
        return {"server.address": target.removeprefix("unix:")}
    host, colon, port = target.rpartition("/")[2].rpartition(":")
    if colon and port.isdecimal():
        return {"server.address": host.strip("[]"), "server.port": int(port)}
    return {"server.address": target} if target else {}
