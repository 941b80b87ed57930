"""Spans: one trace per group, from its prompt to its step, across services and through Redis.

The span that creates the group is the root. The group carries its context (carriers.py), and the spans in which stages
work on it are its children. The carrier of an untraced group is empty. Steps have separate traces, to which the
trainer's spans link. docs/traces.md has a table of all spans.
"""

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from opentelemetry.util.types import Attributes

from relaxd.telemetry.carriers import inject, link_from, remote_context
from relaxd.telemetry.messaging import operation_attributes
from relaxd.telemetry.setup import enabled, open_quick_span, tracer


@contextmanager
def create_span(
    group_id: str, stage: str, sample_ratio: float = 1.0, attributes: Attributes = None
) -> Iterator[dict[str, str]]:
    """Open the root of a group's trace, until it is published. Yields the carrier to publish with the group.

    The carrier is empty if the group is not traced. The span isn't the current one, as several groups are published
    together.

    Args:
        group_id: the group.
        stage: the first stage, to which it is published.
        sample_ratio: the share of traced groups, from 0 to 1. The decision depends on the id alone, so that a repeated
            publish makes the same one.
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
def root_span(name: str, *, attributes: Attributes = None, links: Iterable[Mapping[str, str]] = ()) -> Iterator[Span]:
    """Open a span in a new trace, such as a step's or a weight synchronisation's; `links` are carriers."""
    if not enabled():
        yield INVALID_SPAN
        return
    found = [link for link in map(link_from, links) if link is not None]
    with tracer().start_as_current_span(name, Context(), attributes=attributes, links=found) as span:
        yield span
