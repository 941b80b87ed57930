"""`relaxd logs` and `relaxd trace`: the services' logs by time, and the course of a group or step by its spans.

Spans are read from the trace files in a run's folder.
"""

import difflib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, StateOption, new_console
from relaxd.cli.output import show, show_json, show_line
from relaxd.cli.reading.run_source import RUNS, open_run
from relaxd.client import CliError
from relaxd.client.service_logs import LogTail, by_time, log_paths
from relaxd.config import RunConfig
from relaxd.config.load_toml import load_recorded
from relaxd.local import compose
from relaxd.local.state_folder import StateFolder
from relaxd.run_folder import LOGS, TRACES, is_run

GROUP = "relaxd.group_id"
STEP = "relaxd.step"
TRACE_ID = re.compile(r'"traceId": ?"([0-9a-f]{32})"')
"""Matches the trace id of a span, or of a link to a span, in a line of OTLP JSON."""
ERROR = 2
"""OTLP's status code of a span that failed."""


@dataclass(frozen=True, kw_only=True)
class TracedSpan:
    """Span that was read from a trace file."""

    name: str
    instance: str
    """Replica that recorded the span."""
    trace_id: str
    span_id: str
    parent_id: str
    """Id of the parent span; "" for a root."""
    start: int
    """Start of the span, in nanoseconds of Unix time."""
    end: int
    error: str
    """Error text of the span; "" if it didn't fail."""
    attributes: Mapping[str, Any]
    links: tuple[str, ...]
    """Ids of the spans in other traces to which this span links."""


@dataclass(frozen=True)
class GroupTrace:
    """All spans in the trace of a group."""

    root: TracedSpan
    """The span that created the group."""
    spans: list[TracedSpan] = field(default_factory=list)
    """All spans of the group's trace, sorted by start."""
    linked: list[TracedSpan] = field(default_factory=list)
    """Spans of other traces, such as the step's, to which the group's spans link; sorted by start."""


def read_group_trace(run_folder: Path, group_id: str) -> GroupTrace | None:
    """Read the trace of a group; None if the group was not traced.

    Reads every trace file twice, but parses only matching lines.
    """
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
    """Read the spans of a step: those of its trace, of its traced groups, and of the broadcast of its version.

    Returns no spans if the step was not traced. If a step was repeated, only its last execution is read.
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
    """One of the rows of a replica in the timeline. The spans in a row follow each other or are nested."""

    def __init__(self) -> None:
        self._open: list[TracedSpan] = []

    def takes(self, span: TracedSpan) -> bool:
        """Add a span if it follows the row's spans or is nested in the last one. Returns True if it was added.

        Call this with spans in the order of their start.
        """
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


POLL_SECONDS = 0.3


def logs(
    service: Annotated[
        str, typer.Argument(metavar="[SERVICE]", help="A service, such as trainer or rollout-2; default: all.")
    ] = "",
    run_id: Annotated[str, typer.Option("--run", help="A run whose services were started for it.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what is added, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log; 0: all.")] = 100,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Show the logs of the services up here, of the last ones that were, or of a run (--run)."""
    place = StateFolder(state)
    where = _log_folder(place, run_id, folder)
    tails = [LogTail(path) for path in _logs_of(where, service)]
    _print(tails, [tail.read(lines) for tail in tails])
    with suppress(KeyboardInterrupt):
        while follow:
            alive = place.is_up()
            time.sleep(POLL_SECONDS)  # idle: for more lines
            known = {tail.path for tail in tails}
            tails += [LogTail(path) for path in _logs_of(where, service) if path not in known]
            _print(tails, [tail.read() for tail in tails])
            if not alive:
                show("no services are up here: nothing is added to these logs")
                return


def _log_folder(place: StateFolder, run_id: str, folder: Path | None) -> Path:
    """Return the folder of the logs to show: a run's, or those of the services here. Raises CliError."""
    if not run_id and folder is None:
        if compose.read(place) is not None:
            raise CliError(
                "the services up here are containers", f"in {compose.compose_folder()}: docker compose logs --follow"
            )
        if any(place.logs.glob("*.log")):
            return place.logs
    with open_run(run_id, folder, place.path, None) as source:
        found = source.folder / LOGS
    if any(found.glob("*.log")):
        return found
    raise CliError(
        f"run {source.run.run_id} has no logs in its folder: its services were not started for it",
        "relaxd logs shows those of the services here",
    )


def _logs_of(folder: Path, service: str) -> list[Path]:
    """Return the log files of a service, given by name or role, or "" for all. Raises CliError: no such logs."""
    found = log_paths(folder, service)
    if not found:
        names = [path.stem for path in log_paths(folder)]
        close = difflib.get_close_matches(service, names, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        if is_run(RUNS / service):
            hint = f"relaxd logs --run {service} shows those of a run"
        raise CliError(f"there is no log of {service} in {folder}", hint)
    return found


def _print(tails: Sequence[LogTail], texts: Sequence[Sequence[str]]) -> None:
    """Print the lines of logs in the order of their times; with the service's name if there are several logs."""
    width = max(len(tail.path.stem) for tail in tails)
    for line in by_time(tails, texts):
        show_line(f"{line.service:<{width}} | {line.text}" if len(tails) > 1 else line.text)


BAR, MIN_BAR = 24, 8
"""Width and minimum width of the bars that show the times of a trace's spans, in characters."""
FACTS = ("step", "version")
"""Names, without the prefix "relaxd.", of the span attributes that a displayed trace shows."""


def trace(
    group_id: Annotated[str, typer.Argument(metavar="GROUP", help="A group's id, as in `relaxd samples --json`.")] = "",
    chrome: Annotated[
        int, typer.Option("--chrome", metavar="STEP", min=0, help="Print a step's timeline for Perfetto, as JSON.")
    ] = 0,
    run_id: Annotated[str, typer.Option("--run", help="The run's id or folder; default: the newest.")] = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show a group's way from its prompt to its step, or print a step's timeline, with telemetry.traces = "file".

    The timeline (--chrome STEP > timeline.json) has the step and its groups, and opens in https://ui.perfetto.dev.
    """
    if bool(group_id) == bool(chrome):
        raise CliError("name either a group or a step", "relaxd trace GROUP, or relaxd trace --chrome STEP")
    with open_run(run_id, folder, state, coordinator) as source:
        config = load_recorded(source.run.config_json, source.run.run_id)
        if chrome:
            spans = read_step_spans(source.folder, chrome)
            if not spans:
                raise CliError(*_why_untraced(f"step {chrome}", config))
            show_json(chrome_timeline(spans))
            return
        found = read_group_trace(source.folder, group_id)
        if found is None:
            raise CliError(*_why_untraced(f"group {group_id}", config))
        new_console().print(trace_table(found, group_id))


def _why_untraced(what: str, config: RunConfig) -> tuple[str, str]:
    """Return the reason why there is no trace of a group or step, and a hint for the user."""
    if config.telemetry.traces != "file":
        return (
            f'there are no traces in the run\'s folder: telemetry.traces is "{config.telemetry.traces}"',
            "relaxd run FILE.toml --telemetry.traces file writes them",
        )
    if config.telemetry.sample_ratio < 1:
        ratio = config.telemetry.sample_ratio
        return f"there is no trace of {what}: telemetry.sample_ratio = {ratio:g} of all are traced", ""
    return f"there is no trace of {what}", "relaxd samples --json has the ids of groups and steps"


def trace_table(found: GroupTrace, group_id: str) -> Table:
    """Return a table of a group's spans: the tree of spans, and a bar for the time of each."""
    begin = found.root.start
    end = max(span.end for span in found.spans)
    title = f"group {group_id}, trace {found.root.trace_id}"
    table = Table(title=title, title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("span", "replica", "from", "for", "", ""):
        number = name in ("from", "for")
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for depth, span in [*_ordered(found), *((0, span) for span in found.linked)]:
        style = "bold red" if span.error else "dim" if span.name == "wait" else ""
        facts = [f"{name} {span.attributes[f'relaxd.{name}']}" for name in FACTS if f"relaxd.{name}" in span.attributes]
        table.add_row(
            Text("  " * depth + span.name, style),
            span.instance,
            _seconds(span.start - begin),
            _seconds(span.end - span.start),
            _Bar(span, begin, end),
            " ".join([*facts, span.error]).strip(),
        )
    return table


def _ordered(found: GroupTrace) -> Iterator[tuple[int, TracedSpan]]:
    """Yield depth and span for each span of a trace, parents first. A span whose parent was lost is below the root."""
    known = {span.span_id for span in found.spans}
    children: dict[str, list[TracedSpan]] = {}
    for span in found.spans:
        if span.span_id != found.root.span_id:
            parent = span.parent_id if span.parent_id in known else found.root.span_id
            children.setdefault(parent, []).append(span)
    pending = [(0, found.root)]
    while pending:
        depth, span = pending.pop()
        yield depth, span
        pending += [(depth + 1, child) for child in reversed(children.pop(span.span_id, []))]


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.3f} s"


@dataclass(frozen=True)
class _Bar:
    """Draws the time of a span within a trace as a bar. The part of a span outside of the trace's time is cut off."""

    span: TracedSpan
    begin: int
    end: int

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(MIN_BAR, BAR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(BAR, options.max_width)
        scale = width / max(self.end - self.begin, 1)
        first, last = (min(max(int((at - self.begin) * scale), 0), width) for at in (self.span.start, self.span.end))
        first = min(first, width - 1)
        yield Text(" " * first + "━" * max(1, last - first), no_wrap=True)
