"""The spans of one group, or of one step, read from the trace files in a run's folder."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaxd.run_folder import TRACES

GROUP = "relaxd.group_id"
STEP = "relaxd.step"
TRACE_ID = re.compile(r'"traceId": ?"([0-9a-f]{32})"')
"""Matches the trace id of a span or a link in a line of OTLP JSON."""
ERROR = 2
"""OTLP's status code of a span that failed."""


@dataclass(frozen=True, kw_only=True)
class TracedSpan:
    """A span of a trace file."""

    name: str
    instance: str
    """Replica that recorded the span."""
    trace_id: str
    span_id: str
    parent_id: str
    """Id of its parent; "" for a root."""
    start: int
    """Nanoseconds of Unix time."""
    end: int
    error: str
    """Error text; "" without an error."""
    attributes: Mapping[str, Any]
    links: tuple[str, ...]
    """Ids of linked spans in other traces."""


@dataclass(frozen=True)
class GroupTrace:
    """The trace of a group."""

    root: TracedSpan
    """The span that created the group."""
    spans: list[TracedSpan] = field(default_factory=list)
    """All spans of the trace by start."""
    linked: list[TracedSpan] = field(default_factory=list)
    """Linked spans of other traces, such as the step's, by start."""


def read_group_trace(run_folder: Path, group_id: str) -> GroupTrace | None:
    """Read the trace of a group; None if it was not traced. Reads every file twice, but parses only matching lines."""
    created = (
        span
        for span in _spans_with(run_folder, group_id)
        if not span.parent_id and span.attributes.get(GROUP) == group_id
    )
    root = max(created, key=lambda span: span.start, default=None)  # a repeated publish has a separate trace
    if root is None:
        return None
    found = list(_spans_with(run_folder, root.trace_id))
    spans = sorted((span for span in found if span.trace_id == root.trace_id), key=lambda span: span.start)
    wanted = {link for span in spans for link in span.links}
    linked = {span.span_id: span for link in wanted for span in _spans_with(run_folder, link) if span.span_id == link}
    return GroupTrace(root, spans, sorted(linked.values(), key=lambda span: span.start))


def read_step_spans(run_folder: Path, step: int) -> list[TracedSpan]:
    """Read the spans of a step: of its trace, of its traced groups, and of the broadcast of its version.

    Empty if the step was not traced. If a step was repeated, only its last execution is read.
    """
    steps = (
        span for span in _spans_with(run_folder, '"step"') if span.name == "step" and span.attributes.get(STEP) == step
    )
    last = max(steps, key=lambda span: span.start, default=None)
    if last is None:
        return []
    traces = {span.trace_id for span in _spans_with(run_folder, last.span_id) if last.span_id in span.links}
    traces.add(last.trace_id)
    found = _spans_of_lines(run_folder, lambda line: not traces.isdisjoint(TRACE_ID.findall(line)))
    return [span for span in found if span.trace_id in traces]


def _spans_with(run_folder: Path, text: str) -> Iterator[TracedSpan]:
    """Yield the spans of all lines of trace files that contain a text."""
    return _spans_of_lines(run_folder, lambda line: text in line)


def _spans_of_lines(run_folder: Path, wanted: Callable[[str], bool]) -> Iterator[TracedSpan]:
    """Yield the spans of all lines of trace files that `wanted` selects."""
    for path in sorted((run_folder / TRACES).glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for line in file:
                if wanted(line):
                    try:
                        export = json.loads(line)
                    except ValueError:  # incomplete: the process died while writing it
                        continue
                    yield from _spans_of(export)


def _spans_of(export: Mapping[str, Any]) -> Iterator[TracedSpan]:
    for resource in export.get("resourceSpans", ()):
        instance = str(_attributes(resource.get("resource", {})).get("service.instance.id", ""))
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                status = span.get("status", {})
                yield TracedSpan(
                    name=span["name"],
                    instance=instance,
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent_id=span.get("parentSpanId", ""),
                    start=int(span["startTimeUnixNano"]),
                    end=int(span["endTimeUnixNano"]),
                    error=(status.get("message") or "failed") if status.get("code") == ERROR else "",
                    attributes=_attributes(span),
                    links=tuple(link["spanId"] for link in span.get("links", ())),
                )


def _attributes(owner: Mapping[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in owner.get("attributes", ())}


def _value(value: Mapping[str, Any]) -> Any:
    """Convert a value of OTLP JSON, in which 64-bit integers are text."""
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_value(one) for one in value["arrayValue"].get("values", ())]
    return next((value[name] for name in ("stringValue", "doubleValue", "boolValue") if name in value), None)


class _Lane:
    """A row of a replica in the timeline, with spans that follow each other or are nested."""

    def __init__(self) -> None:
        self._open: list[TracedSpan] = []

    def takes(self, span: TracedSpan) -> bool:
        """Add a span if it fits, and return whether it did. Call in the order of the spans' start."""
        while self._open and self._open[-1].end <= span.start:
            self._open.pop()
        if self._open and (span.end > self._open[-1].end or span.trace_id != self._open[-1].trace_id):
            return False
        self._open.append(span)
        return True


def chrome_timeline(spans: Iterable[TracedSpan]) -> dict[str, Any]:
    """Return spans as the JSON of Chrome's trace format: a process for each replica, times in microseconds.

    A span that overlaps with others of its replica gets another row.
    """
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    replicas = sorted({span.instance for span in ordered})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": replica}}
        for number, replica in enumerate(replicas, 1)
    ]
    begin = ordered[0].start if ordered else 0
    lanes: dict[str, list[_Lane]] = {replica: [] for replica in replicas}
    for span in ordered:
        rows = lanes[span.instance]
        row = next((number for number, lane in enumerate(rows) if lane.takes(span)), len(rows))
        if row == len(rows):
            rows.append(_Lane())
            rows[-1].takes(span)
        failure = {"error": span.error} if span.error else {}
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": replicas.index(span.instance) + 1,
                "tid": row + 1,
                "ts": (span.start - begin) / 1e3,
                "dur": (span.end - span.start) / 1e3,
                "args": {**span.attributes, **failure, "trace_id": span.trace_id, "span_id": span.span_id},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
