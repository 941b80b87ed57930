"""Spans at a fraction of a tracer's cost, for operations that run thousands of times a second.

A control call takes less than a millisecond, and its two spans would be a tenth of that. So these spans ask no sampler
(their parent is recorded anyway), have no limits, and may share attributes with similar spans. The SDK's processors and
exporters can read them.
"""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue


class QuickSpan(ReadableSpan, Span):
    """A lightweight span. The code that opens it must end it once, in any thread."""

    def __init__(
        self,
        name: str,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        links: Sequence[Link] = (),
        start_time: int | None = None,
        *,
        processor: SpanProcessor,
        scope: InstrumentationScope,
        resource: Resource | None,
    ) -> None:
        """Start a span, now or at `start_time` (nanoseconds of Unix time). Without a parent it begins a new trace.

        The span never changes `attributes`, so that many spans can share them.
        """
        span_id = random.getrandbits(64) or 1
        if parent is None:
            context = SpanContext(random.getrandbits(128) or 1, span_id, False, TraceFlags(TraceFlags.SAMPLED))
        else:
            context = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        ReadableSpan.__init__(
            self,
            name,
            context,
            parent,
            resource,
            attributes,
            links=links,
            kind=kind,
            start_time=time.time_ns() if start_time is None else start_time,
            instrumentation_scope=scope,
        )
        self._span_context = context
        self._processor = processor

    def get_span_context(self) -> SpanContext:
        return self._span_context

    def is_recording(self) -> bool:
        return self._end_time is None

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._attributes = {**(self._attributes or {}), **attributes}

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self._events = [*self._events, Event(name, attributes, timestamp or time.time_ns())]

    def record_exception(
        self, exception: BaseException, attributes: Any = None, timestamp: int | None = None, escaped: bool = False
    ) -> None:
        told = {"exception.type": type(exception).__qualname__, "exception.message": str(exception)}
        self.add_event("exception", {**told, **(attributes or {})}, timestamp)

    def update_name(self, name: str) -> None:
        self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._status = status if isinstance(status, Status) else Status(status, description)

    def end(self, end_time: int | None = None) -> None:
        self._end_time = time.time_ns() if end_time is None else end_time
        self._processor.on_end(self)
