"""`relaxd trace`: the way of one group through the services, as a tree."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, StateOption, new_console
from relaxd.cli.reading.source import open_run
from relaxd.client.errors import CliError
from relaxd.config import RunConfig
from relaxd.report.traces import GroupTrace, TracedSpan, read_group_trace

BAR, MIN_BAR = 24, 8
"""Width of the time line where there is room, and where there is little."""
FACTS = ("step", "version")
"""Attributes to show."""


def trace(
    group_id: Annotated[str, typer.Argument(metavar="GROUP", help="A group's id, as in `relaxd samples --json`.")],
    run_id: Annotated[str, typer.Option("--run", help="The run's id or folder; default: the newest.")] = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show a group's way from its prompt to its step, in a run with telemetry.traces = "file"."""
    with open_run(run_id, folder, state, coordinator) as source:
        found = read_group_trace(source.folder, group_id)
        if found is None:
            raise CliError(*_why_untraced(group_id, RunConfig.model_validate_json(source.run.config_json)))
        new_console().print(trace_table(found, group_id))


def _why_untraced(group_id: str, config: RunConfig) -> tuple[str, str]:
    """Return why there is no trace of a group, and a hint."""
    if config.telemetry.traces != "file":
        return (
            f'there are no traces in the run\'s folder: telemetry.traces is "{config.telemetry.traces}"',
            "relaxd run FILE.toml --telemetry.traces file writes them",
        )
    if config.telemetry.sample_ratio < 1:
        ratio = config.telemetry.sample_ratio
        return f"there is no trace of group {group_id}: telemetry.sample_ratio = {ratio:g} of all are traced", ""
    return f"there is no trace of group {group_id}", "relaxd samples --json has the ids of groups"


def trace_table(found: GroupTrace, group_id: str) -> Table:
    """Format a group's spans as a tree with a time line."""
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
    """Yield the spans, parents first, each with its depth. A span whose parent was lost is a child of the root."""
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
    """The part of a trace's time that a span took, as a bar; a span of another trace may be partly outside."""

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
