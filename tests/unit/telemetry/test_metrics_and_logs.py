"""Telemetry without an exporter: the table of metrics, its page, log lines."""

import json
import logging
import re
from pathlib import Path

import pytest
from opentelemetry import trace

from relaxd import telemetry
from relaxd.telemetry.logs import JsonFormatter, TextFormatter
from relaxd.telemetry.metrics import METRICS, markdown


def test_the_page_of_metrics_is_current():
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run: python -m relaxd.telemetry > docs/metrics.md"


def test_every_metric_has_a_unit_and_a_description():
    for metric in METRICS.values():
        assert re.fullmatch(r"1|s|By|\{[a-z]+\}(/s)?", metric.unit), metric
        assert metric.description.endswith("."), metric
        assert (metric.bounds is not None) == (metric.kind == "histogram"), metric


def test_an_unknown_metric_is_an_error_even_when_nothing_is_exported():
    telemetry.record("queue.waiting", 1)
    with pytest.raises(KeyError, match=r"queue\.wating"):
        telemetry.record("queue.wating", 1)


def test_nothing_is_traced_when_nothing_is_exported():
    with telemetry.create_span("g1", "rollout") as carrier:
        assert carrier == {}
    span = telemetry.open_stage_span("reward", "g1", {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    assert not span.is_recording()
    assert telemetry.inject(span) == {}
    assert telemetry.link_from({}) is None
    link = telemetry.link_from({"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    assert link is not None
    assert f"{link.context.trace_id:x}" == "1" * 32


@pytest.fixture
def entry() -> logging.LogRecord:
    try:
        raise ValueError("broken")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("relaxd.rpc", logging.ERROR, __file__, 1, "call of %s failed", ("Score",), info)
    record.created, record.msecs = 1767225600.25, 250
    return record


def test_log_lines_for_people(entry):
    first, *rest = TextFormatter("reward-1").format(entry).splitlines()
    assert first == "2026-01-01T00:00:00.250Z ERROR reward-1 call of Score failed"
    assert rest[-1] == "    ValueError: broken"


def test_every_line_in_a_span_has_its_ids(entry):
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False)
    with trace.use_span(trace.NonRecordingSpan(context)):
        first = TextFormatter("reward-1").format(entry).splitlines()[0]
        parsed = json.loads(JsonFormatter("reward-1").format(entry))
    assert first.endswith(f" call of Score failed trace_id={'0' * 29}abc span_id={'0' * 13}def")
    assert (parsed["trace_id"], parsed["span_id"]) == (f"{'0' * 29}abc", f"{'0' * 13}def")


def test_log_lines_for_machines(entry):
    parsed = json.loads(JsonFormatter("reward-1").format(entry))
    assert parsed.pop("exception").endswith("ValueError: broken")
    assert parsed == {
        "time": "2026-01-01T00:00:00.250Z",
        "level": "ERROR",
        "service": "reward-1",
        "logger": "relaxd.rpc",
        "message": "call of Score failed",
    }
