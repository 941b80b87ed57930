"""The rows of a timeline: spans that overlap are in different ones."""

from relaxd.cli.reading.logs_command import TracedSpan, chrome_timeline


def span(name: str, start: int, end: int, trace: str = "a", instance: str = "rollout-1") -> TracedSpan:
    return TracedSpan(
        name=name,
        instance=instance,
        trace_id=trace,
        span_id=name,
        parent_id="",
        start=start * 1000,
        end=end * 1000,
        error="lost" if name == "failed" else "",
        attributes={},
        links=(),
    )


def test_only_spans_within_others_share_their_row() -> None:
    spans = [
        span("group", 10, 50),
        span("turn", 20, 30),
        span("beside", 15, 40, "b"),
        span("across", 45, 60),
        span("failed", 50, 55, "c"),
        span("elsewhere", 12, 90, "a", "reward-1"),
    ]
    events = chrome_timeline(reversed(spans))["traceEvents"]
    rows = {event["name"]: (event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert rows == {
        "group": (2, 1),
        "turn": (2, 1),
        "beside": (2, 2),
        "across": (2, 2),
        "failed": (2, 1),
        "elsewhere": (1, 1),
    }
    times = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert times["group"] == (0.0, 40.0)
    assert times["turn"] == (10.0, 10.0)
    assert [event["args"]["error"] for event in events if "error" in event["args"]] == ["lost"]


def test_no_spans_are_an_empty_timeline() -> None:
    assert chrome_timeline([]) == {"traceEvents": [], "displayTimeUnit": "ms"}
