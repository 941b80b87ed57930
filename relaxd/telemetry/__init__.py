"""Traces, metrics and logs. Nothing is recorded, at almost no cost, unless it is exported or written."""

from relaxd.telemetry.carriers import inject, link_from, remote_context
from relaxd.telemetry.logs import setup_logging
from relaxd.telemetry.messaging import BatchSpan, record_batch
from relaxd.telemetry.metrics import METRICS, Metric, record, record_step
from relaxd.telemetry.setup import enabled, flush, meter, setup, shutdown, tracer, write_traces
from relaxd.telemetry.spans import create_span, open_stage_span, root_span

__all__ = [
    "METRICS",
    "BatchSpan",
    "Metric",
    "create_span",
    "enabled",
    "flush",
    "inject",
    "link_from",
    "meter",
    "open_stage_span",
    "record",
    "record_batch",
    "record_step",
    "remote_context",
    "root_span",
    "setup",
    "setup_logging",
    "shutdown",
    "tracer",
    "write_traces",
]
