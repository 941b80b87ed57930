"""Spans in a run's folder, whose disk may be full."""

import json
import logging
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from relaxd.telemetry.exporters import TraceFiles
from tests.kit.disks import full_disk


def span(name: str) -> ReadableSpan:
    """A span that has ended."""
    made = TracerProvider().get_tracer("test").start_span(name)
    made.end()
    assert isinstance(made, ReadableSpan)
    return made


def names(folder: Path) -> list[str]:
    """The names of the spans in a run's folder."""
    (path,) = (folder / "traces").iterdir()
    return [
        one["name"]
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for one in scope["spans"]
    ]


def test_what_a_full_disk_refuses_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TraceFiles("trainer-0")
    files.open(tmp_path)
    assert files.export([span("first")]) is SpanExportResult.SUCCESS
    size = next((tmp_path / "traces").iterdir()).stat().st_size
    with caplog.at_level(logging.WARNING), full_disk(size + 20):
        assert files.export([span("second"), span("third")]) is SpanExportResult.FAILURE
        assert files.export([span("fourth")]) is SpanExportResult.FAILURE
    assert names(tmp_path) == ["first"], "and no part of a line"
    with caplog.at_level(logging.WARNING):
        assert files.export([span("fifth")]) is SpanExportResult.SUCCESS
    assert names(tmp_path) == ["first", "fifth"]
    (began, ended) = [record.getMessage() for record in caplog.records]
    assert "spans are dropped" in began
    assert "File too large" in began
    assert ended == "spans are written again; 3 were dropped"
