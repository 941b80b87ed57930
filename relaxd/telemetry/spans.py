"""Spans: one trace per group, from publish to train, across services and through Redis.

The publish span is the root. The group carries its context as a dict such as {"traceparent": "00-..."}, the carrier,
and the spans of all stages are its children. The carrier of an untraced group is empty. Steps have separate traces, to
which the train spans link.
"""

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from relaxd.telemetry.setup import enabled, tracer

SPAN_NAMES = {"rollout": "generate", "reward": "score"}
"""Span names that differ from the stage's name."""

_propagator = TraceContextTextMapPropagator()


def inject(span: Span | None = None) -> dict[str, str]:
    """Return the carrier of a span, by default the current one; empty if it isn't recorded."""
    carrier: dict[str, str] = {}
    span = trace.get_current_span() if span is None else span
    if span.get_span_context().is_valid:
        _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """Return the context of a carrier."""
    return _propagator.extract(carrier, Context())


def link_from(carrier: Mapping[str, str]) -> Link | None:
    """Return a link to a carrier's span, or None for an empty carrier."""
    context = trace.get_current_span(extract(carrier)).get_span_context()
    return Link(context) if context.is_valid else None


@contextmanager
def publish_span(group_id: str, sample_ratio: float = 1.0, attributes: Attributes = None) -> Iterator[dict[str, str]]:
    """Open the root of a group's trace. Yields the carrier to publish with the group, empty if it is not traced.

    `sample_ratio` is the share of traced groups, from 0 to 1. The decision depends on the id alone, so that a repeated
    publish makes the same one.
    """
    if not enabled() or zlib.crc32(group_id.encode()) >= sample_ratio * 2**32:
        yield {}
        return
    with tracer().start_as_current_span(
        "publish", Context(), SpanKind.PRODUCER, {**(attributes or {}), "relaxd.group_id": group_id}
    ) as span:
        yield inject(span)


def open_stage_span(
    stage: str,
    carrier: Mapping[str, str],
    *,
    waited_seconds: float | None = None,
    started_at: int | None = None,
    attributes: Attributes = None,
    links: Iterable[Mapping[str, str]] = (),
) -> Span:
    """Start the span of a stage's work on one group; the caller ends it, in any thread.

    Args:
        stage: the stage (the span of "rollout" is called "generate", that of "reward" "score").
        carrier: the carrier from publish_span. If it is empty, the span does nothing.
        waited_seconds: time that the group waited for the stage: an attribute, and a span "wait" that ends where
            this one starts.
        started_at: start of the work in microseconds of Unix time; None: now.
        attributes: further attributes.
        links: carriers of spans to link to, such as the step's.
    """
    if not enabled() or not carrier:
        return INVALID_SPAN
    parent = extract(carrier)
    values = {**(attributes or {}), "relaxd.stage": stage}
    start = time.time_ns() if started_at is None else started_at * 1000
    if waited_seconds is not None:
        values["relaxd.wait_seconds"] = waited_seconds
        enqueued = start - int(waited_seconds * 1e9)
        tracer().start_span("wait", parent, SpanKind.INTERNAL, {"relaxd.stage": stage}, start_time=enqueued).end(start)
    return tracer().start_span(
        SPAN_NAMES.get(stage, stage),
        parent,
        SpanKind.CONSUMER,
        values,
        [link for link in map(link_from, links) if link is not None],
        start_time=start,
    )


@contextmanager
def stage_span(
    stage: str,
    carrier: Mapping[str, str],
    *,
    waited_seconds: float | None = None,
    attributes: Attributes = None,
    links: Iterable[Mapping[str, str]] = (),
) -> Iterator[Span]:
    """Open the span of a stage's work on one group as the current one. See open_stage_span for the arguments.

    An exception that leaves the block is recorded and marks the span as an error.
    """
    span = open_stage_span(stage, carrier, waited_seconds=waited_seconds, attributes=attributes, links=links)
    if span is INVALID_SPAN:
        yield span
        return
    with trace.use_span(span, end_on_exit=True):
        yield span


@contextmanager
def root_span(name: str, *, attributes: Attributes = None, links: Iterable[Mapping[str, str]] = ()) -> Iterator[Span]:
    """Open a span in a new trace, such as a step's or a weight synchronisation's; `links` are carriers."""
    if not enabled():
        yield INVALID_SPAN
        return
    found = [link for link in map(link_from, links) if link is not None]
    with tracer().start_as_current_span(name, Context(), attributes=attributes, links=found) as span:
        yield span
