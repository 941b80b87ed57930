"""Contexts of spans as they travel: a dict such as {"traceparent": "00-..."}, the carrier."""

import re
from collections.abc import Mapping
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, Link, Span, SpanContext, TraceFlags, TraceState

KNOWN = 4096
"""Contexts that are remembered: a group's carrier is read by every operation on it."""
MOST_LETTERS = 512
"""Of either header; longer ones are ignored."""

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:(?<!^00.{53})-.*)?")
"""W3C Trace Context, as opentelemetry.trace.propagation.tracecontext reads it, but quicker."""


def inject(span: Span | None = None) -> dict[str, str]:
    """Return the carrier of a span, by default the current one; empty if it isn't recorded."""
    context = (trace.get_current_span() if span is None else span).get_span_context()
    if not context.is_valid:
        return {}
    carrier = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        carrier["tracestate"] = context.trace_state.to_header()
    return carrier


def remote_context(carrier: Mapping[str, str]) -> SpanContext:
    """Return the context of a carrier's span; an invalid one for a carrier that has none."""
    parent, state = carrier.get("traceparent"), carrier.get("tracestate", "")
    if not parent or len(parent) > MOST_LETTERS:
        return INVALID_SPAN_CONTEXT
    return _read(parent, state if len(state) <= MOST_LETTERS else "")


def link_from(carrier: Mapping[str, str]) -> Link | None:
    """Return a link to a carrier's span, or None for an empty carrier."""
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
