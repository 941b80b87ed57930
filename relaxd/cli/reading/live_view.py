"""Rendering of a run: a live display on a terminal, one line per step elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relaxd.client.coordinator_client import ENDED, state_name
from relaxd.media.shown import conversation_lines, media_line
from relaxd.report.run_result import sample_values
from relaxd.telemetry.logs import escape
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HEALTH_STATE_HEALTHY, RunEvent
from relaxd.waiting import duration

BARS = "▁▂▃▄▅▆▇█"
SHOWN_STEPS = 8
SHOWN_EVENTS = 3
SHOWN_NOTICES = 2
SHOWN_REWARDS = 30
MAX_ROWS = 40
"""Maximum number of rows of the live display if its height isn't limited."""
TABLE_HEAD, SAMPLES_HEAD, MIN_SAMPLE_ROWS = 1, 2, 4
STATE_STYLES = {"running": "green", "stopped": "green", "paused": "yellow", "failed": "bold red"}

COLUMNS = (
    ("reward", "reward_mean", "{:.3f}"),
    ("accuracy", "reward_accuracy", "{:.3f}"),
    ("format", "reward_format", "{:.3f}"),
    ("length", "response_length_mean", "{:.1f}"),
    ("staleness", "staleness_mean", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("seconds", "step_seconds", "{:.1f}"),
)
"""Title, metric and number format of each column in tables of steps; metrics that a run lacks are left out."""


@dataclass
class RunView:
    """State of a followed run, according to the coordinator's messages so far."""

    run: pb.Run = field(default_factory=pb.Run)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: Sequence[pb.TrainedSample] = ()
    events: Sequence[RunEvent] = ()
    """Newest health events of the run, oldest first."""
    notices: list[str] = field(default_factory=list)
    """Notices for the user about the run, oldest first."""

    def update(self, response: pb.WatchRunResponse) -> list[int]:
        """Add a message of the coordinator. Returns the numbers of the steps that are new."""
        self.run = response.run
        new = [step.step for step in response.steps if step.step not in self.steps]
        self.steps.update((step.step, dict(step.metrics)) for step in response.steps)
        self.events = [*self.events, *response.events][-SHOWN_EVENTS:]
        return new


def sparkline(values: Sequence[float]) -> str:
    """Format values, clamped to 0 to 1, as a row of bars."""
    top = len(BARS) - 1
    return "".join(BARS[round(min(max(value, 0.0), 1.0) * top)] for value in values)


def step_line(step: int, steps: int, metrics: dict[str, float]) -> str:
    """Return a line with a step's number and main metrics."""
    shown = [f"{title} {style.format(metrics[name])}" for title, name, style in COLUMNS if name in metrics]
    return f"step {step:>{len(str(steps))}}/{steps}  " + "  ".join(shown)


def evaluation_line(metrics: dict[str, float], when: str) -> str:
    """Format a held-out evaluation as one line."""
    return f"held-out, {when}: {_evaluated(metrics)}"


def _evaluated(metrics: Mapping[str, float]) -> str:
    names = ("reward", "accuracy", "format")
    held_out = ", ".join(f"{name} {metrics[f'eval_{name}']:.2f}" for name in names if f"eval_{name}" in metrics)
    sets = [
        f"{name.split('/')[1]} reward {value:.2f}"
        for name, value in sorted(metrics.items())
        if name.startswith("eval/") and name.endswith("/reward")
    ]
    return "; ".join(([held_out] if held_out else []) + sets)


def time_left(run: pb.Run) -> str:
    """Return the run's remaining time in words; "" if it isn't known."""
    if not run.HasField("remaining_seconds") or run.state in ENDED:
        return ""
    return f"; about {duration(run.remaining_seconds)} left"


def pace(run: pb.Run) -> str:
    """Return the duration of a step in words; "" if it isn't known."""
    left = run.steps - run.step
    if not run.HasField("remaining_seconds") or run.state in ENDED or left <= 0:
        return ""
    seconds = run.remaining_seconds / left
    return f"; {f'{seconds:.2g} s' if seconds < 10 else duration(seconds)} a step"


def event_line(event: RunEvent) -> str:
    """Format a health event as one line."""
    return f"health of {event.instance or event.role}: {event.text}"


class Picture:
    """Live display of a run. Recent steps and samples fill the rows of the screen that are left."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, height = self._view, options.height
        lines = options.update(height=None)

        def rows(*parts: RenderableType) -> int:
            return sum(len(console.render_lines(part, lines)) for part in parts)

        above, below = [head(view)], [_queues(view.run), *news(view)]
        left = height - rows(*above, *below) if height is not None else MAX_ROWS
        steps = min(SHOWN_STEPS, len(view.steps), max(1, left - TABLE_HEAD - MIN_SAMPLE_ROWS))
        left -= steps + TABLE_HEAD if steps else 0
        samples = view.samples[: max(0, left - SAMPLES_HEAD)]
        yield from above
        if steps:
            yield steps_table(view, steps)
        yield from below
        if samples:
            yield samples_table(samples, title="fresh samples", one_line=True)


def head(view: RunView) -> RenderableType:
    """Return a view of the run's state: a progress bar of the steps, their pace, and the remaining time."""
    run, state = view.run, state_name(view.run.state)
    line = Text.assemble(
        ("relaxd", "cyan"), f"  run {run.run_id or '...'}  ", (state, STATE_STYLES.get(state, "cyan")),
        f"  step {run.step}/{run.steps}{pace(run)}{time_left(run)}", (f"  {run.reason}" if run.reason else "", "dim"),
    )  # fmt: skip
    rewards = [view.steps[step]["reward_mean"] for step in sorted(view.steps) if "reward_mean" in view.steps[step]]
    curve = Text.assemble("reward ", (sparkline(rewards[-SHOWN_REWARDS:]) or "·", "green"))
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=max(run.steps, 1), completed=run.step, width=20), curve)
    evaluated = _evaluated(run.metrics)
    more = [Text(f"held-out {evaluated}", "bold")] if evaluated else []
    return Group(line, grid, *more, *([Text(run.waiting_for, "yellow")] if run.waiting_for else []))


def news(view: RunView) -> list[RenderableType]:
    """Return the newest health events and notices of a run, a line for each."""
    news: list[RenderableType] = []
    for event in view.events:
        style = "green" if event.state == HEALTH_STATE_HEALTHY else "yellow"
        news.append(Text(f"{event.create_time.ToDatetime():%H:%M:%S} {event_line(event)}", style))
    return news + [Text(notice, "yellow") for notice in view.notices[-SHOWN_NOTICES:]]


def steps_table(view: RunView, shown: int) -> Table:
    """Return a table of the run's newest steps with their metrics."""
    recent = sorted(view.steps)[-shown:]
    columns = [column for column in COLUMNS if any(column[1] in view.steps[step] for step in recent)]
    table = Table("step", *(title for title, _, _ in columns), box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in table.columns:
        column.justify = "right"
        column.no_wrap = True
    for step in recent:
        metrics = view.steps[step]
        cells = [style.format(metrics[name]) if name in metrics else "" for _, name, style in columns]
        table.add_row(str(step), *cells, style="bold" if step == recent[-1] else None)
    return table


def _queues(run: pb.Run) -> Text:
    groups = run.groups
    text = Text.assemble(
        ("groups ", "dim"),
        f"published {groups.published}  open {groups.open}  trained {groups.trained}  dropped {groups.dropped}",
    )
    if groups.dropped_by_reason:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(groups.dropped_by_reason.items()))
        text.append(f" ({reasons})", style="dim")
    if run.queues:
        text.append("\nqueues ", style="dim")
        text.append("  ".join(f"{queue.stage} {queue.waiting}+{queue.held}" for queue in run.queues))
        text.append("  (waiting+held)", style="dim")
    return text


def samples_table(samples: Sequence[pb.TrainedSample], *, title: str = "", one_line: bool = False) -> Table:
    """List samples, one per row: whole, or with `one_line` cut to one line."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="dim",
        box=None,
        header_style="dim",
        padding=(0, 2, 0, 0),
        expand=one_line,
    )
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("version", justify="right", no_wrap=True)
    for column, width in (("prompt", 48), ("response", 48), ("answer", 24)):
        if one_line:
            table.add_column(column, overflow="ellipsis", no_wrap=True, ratio=width)
        else:
            table.add_column(column, overflow="fold", max_width=width)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("advantage", justify="right", no_wrap=True)
    for sample in samples:
        style = "green" if sample.advantage > 0 else "red" if sample.advantage < 0 else None
        table.add_row(
            str(sample.step),
            str(sample.version),
            _prompt(sample, one_line=one_line),
            _response(sample, one_line=one_line) or "(nothing)",
            printable(sample.answer),
            f"{sample.reward:.2f}",
            Text(f"{sample.advantage:+.2f}", style=style or ""),
        )
    return table


def _prompt(sample: pb.TrainedSample, *, one_line: bool) -> Text:
    """Return a sample's prompt; unless `one_line`, also its media, one per line."""
    media = [] if one_line else sample_values(sample).get("media", [])
    return Text("\n").join([printable(sample.prompt), *(printable(media_line(item)) for item in media)])


def _response(sample: pb.TrainedSample, *, one_line: bool) -> Text:
    """Return a sample's answer; unless `one_line`, its conversation, if any, one message per line."""
    lines = [] if one_line else conversation_lines(sample_values(sample))
    return Text("\n").join(map(printable, lines)) if lines else printable(sample.response)


def printable(text: str) -> Text:
    """Put a model's text on one line and escape control characters."""
    return Text(escape(" ".join(text.split())))
