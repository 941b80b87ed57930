"""A step's spans as a timeline in Chrome's trace format, which Perfetto opens: the step, its groups, its broadcast."""

from collections.abc import Iterable
from typing import Any

from relaxd.report.traces import TracedSpan


class _Lane:
    """A row of a replica in the timeline, with spans that follow each other or are nested."""

    def __init__(self) -> None:
        self._open: list[TracedSpan] = []

    def takes(self, span: TracedSpan) -> bool:
        """Add a span, if there is room; spans come in order of their start. Returns whether it was added."""
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
