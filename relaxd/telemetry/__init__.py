"""Traces, metrics and logs. Nothing is recorded, at almost no cost, unless it is exported or written."""

from relaxd.telemetry.logs import setup_logging
from relaxd.telemetry.metrics import METRICS, Metric, record, record_step
from relaxd.telemetry.setup import enabled, flush, meter, setup, shutdown, tracer, write_traces
from relaxd.telemetry.spans import (
    extract,
    inject,
    link_from,
    open_stage_span,
    publish_span,
    root_span,
    stage_span,
)

__all__ = [
    "METRICS",
    "Metric",
    "enabled",
    "extract",
    "flush",
    "inject",
    "link_from",
    "meter",
    "open_stage_span",
    "publish_span",
    "record",
    "record_step",
    "root_span",
    "setup",
    "setup_logging",
    "shutdown",
    "stage_span",
    "tracer",
    "write_traces",
]
