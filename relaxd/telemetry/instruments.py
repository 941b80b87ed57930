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
"""True if this process exports anything by OTLP."""
writing = False
"""True if this process writes spans into a run's folder."""
open_quick: "Callable[..., QuickSpan] | None" = None
"""Function that opens a span for the provider's processors, once there is a provider."""


def enabled() -> bool:
    """Return True if this process exports anything."""
    return exporting or writing


def tracer() -> Tracer:
    """Return the tracer of this process; its spans do nothing unless something is exported."""
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
    """Open a span, which the caller ends; None if nothing is recorded, or its parent isn't.

    `attributes` belong to the caller, who must not change them: many spans can share them. `start_time` is in
    nanoseconds of Unix time; by default now. Without a parent the span is in a new trace.
    """
    if open_quick is None or not enabled() or (parent is not None and not parent.trace_flags.sampled):
        return None
    return open_quick(name, parent, kind, attributes, links, start_time)


def meter() -> Meter:
    """Return the meter of this process. Prefer `record`, which uses the table of metrics."""
    return metrics.get_meter("relaxd", __version__)
