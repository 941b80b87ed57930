"""Traces, metrics and logs. Unless they are exported or written, nothing is recorded, at almost no cost."""

from relaxd.telemetry.instruments import enabled, meter, tracer
from relaxd.telemetry.logs import setup_logging
from relaxd.telemetry.metrics import METRICS, Metric, record, record_step
from relaxd.telemetry.setup import flush, setup, shutdown, write_traces
from relaxd.telemetry.spans import (
    BatchSpan,
    create_span,
    inject,
    link_from,
    open_stage_span,
    part_span,
    record_batch,
    remote_context,
    root_span,
    trace_id,
)

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
    "part_span",
    "record",
    "record_batch",
    "record_step",
    "remote_context",
    "root_span",
    "setup",
    "setup_logging",
    "shutdown",
    "trace_id",
    "tracer",
    "write_traces",
]
