"""Traces, metrics and logs. Nothing is recorded, at almost no cost, unless it is exported or written."""

from relaxd.telemetry.carriers import extract, inject, link_from, remote_context
from relaxd.telemetry.logs import setup_logging
from relaxd.telemetry.messaging import record_receive, send_span, settle_span
from relaxd.telemetry.metrics import METRICS, Metric, record, record_step
from relaxd.telemetry.setup import enabled, flush, meter, setup, shutdown, tracer, write_traces
from relaxd.telemetry.spans import create_span, open_stage_span, root_span

__all__ = [
    "METRICS",
    "Metric",
    "create_span",
    "enabled",
    "extract",
    "flush",
    "inject",
    "link_from",
    "meter",
    "open_stage_span",
    "record",
    "record_receive",
    "record_step",
    "remote_context",
    "root_span",
    "send_span",
    "settle_span",
    "setup",
    "setup_logging",
    "shutdown",
    "tracer",
    "write_traces",
]
