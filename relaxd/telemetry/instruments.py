"""Instruments of this process: its tracer, its meter, and the spans of its hot paths. setup.py enables them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from opentelemetry import metrics, trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, SpanContext, SpanKind, Tracer
from opentelemetry.trace import TracerProvider as AbstractTracerProvider
from opentelemetry.util.types import AttributeValue

from relaxd import __version__

if TYPE_CHECKING:
    from relaxd.telemetry.lightweight_spans import QuickSpan

# setup.py sets these three.
exporting = False
"""True if this process exports traces, metrics or logs by OTLP."""
writing = False
"""True if this process writes spans into a run's folder."""
open_quick: "Callable[..., QuickSpan] | None" = None
"""Function that creates a lightweight span; None until this process records spans."""


def enabled() -> bool:
    """Return True if this process exports by OTLP or writes spans to files."""
    return exporting or writing


def tracer() -> Tracer:
    """Return the OpenTelemetry tracer of this process. Its spans do nothing if the process records none."""
    return _tracer_of(trace.get_tracer_provider())


@cache
def _tracer_of(provider: AbstractTracerProvider) -> Tracer:
    # Cached, because the SDK makes a new tracer each time, which takes half as long as a span.
    return provider.get_tracer("relaxd", __version__)


def open_quick_span(
    name: str,
    parent: SpanContext | None,
    kind: SpanKind,
    attributes: Mapping[str, AttributeValue],
    links: Sequence[Link] = (),
    start_time: int | None = None,
) -> "QuickSpan | None":
    """Open a lightweight span, which the caller ends; None if this process records no spans, or not the parent.

    Without a parent the span begins a new trace. The caller must not change `attributes`, because many spans can share
    them. `start_time` is in nanoseconds of Unix time; by default now.
    """
    if open_quick is None or not enabled() or (parent is not None and not parent.trace_flags.sampled):
        return None
    return open_quick(name, parent, kind, attributes, links, start_time)


def meter() -> Meter:
    """Return the OpenTelemetry meter of this process. To record a metric of the table, call `record` instead."""
    return metrics.get_meter("relaxd", __version__)
