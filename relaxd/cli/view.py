"""Rendering of a run: a live display on a terminal, one line per step elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relaxd.client.coordinator import ENDED, state_name
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HEALTH_STATE_HEALTHY, RunEvent
from relaxd.waiting import duration

BARS = "▁▂▃▄▅▆▇█"
SHOWN_STEPS = 8
SHOWN_EVENTS = 3
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
"""Title, metric and format of each column; metrics that a run lacks are left out."""


@dataclass
class RunView:
    """A run as seen so far."""

    run: pb.Run = field(default_factory=pb.Run)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: Sequence[pb.TrainedSample] = ()
    events: Sequence[RunEvent] = ()
    """The newest health events."""

    def update(self, response: pb.WatchRunResponse) -> list[int]:
        """Add a message. Returns the new steps."""
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
    """Format a step as one line."""
    shown = [f"{title} {style.format(metrics[name])}" for title, name, style in COLUMNS if name in metrics]
    return f"step {step:>{len(str(steps))}}/{steps}  " + "  ".join(shown)


def evaluation_line(metrics: dict[str, float], when: str) -> str:
    """Format a held-out evaluation as one line."""
    return (
        f"held-out, {when}: accuracy {metrics['eval_accuracy']:.2f}"
        + (f", format {metrics['eval_format']:.2f}" if "eval_format" in metrics else "")
    )  # fmt: skip


def time_left(run: pb.Run) -> str:
    """Say how long a run will still take, if that is known."""
    if not run.HasField("remaining_seconds") or run.state in ENDED:
        return ""
    return f"; about {duration(run.remaining_seconds)} left"


def event_line(event: RunEvent) -> str:
    """Format a health event as one line."""
    return f"health of {event.instance or event.role}: {event.text}"


def render(view: RunView) -> RenderableType:
    """Build the live display."""
    parts: list[RenderableType] = [_head(view)]
    if view.steps:
        parts.append(_steps_table(view))
    parts.append(_queues(view.run))
    for event in view.events:
        style = "green" if event.state == HEALTH_STATE_HEALTHY else "yellow"
        parts.append(Text(f"{event.create_time.ToDatetime():%H:%M:%S} {event_line(event)}", style))
    if view.samples:
        parts.append(samples_table(view.samples, title="fresh samples"))
    return Panel(Group(*parts), title=f"relaxd · run {view.run.run_id or '...'}", border_style="cyan", padding=(0, 1))


def _head(view: RunView) -> RenderableType:
    run, state = view.run, state_name(view.run.state)
    line = Text.assemble((state, STATE_STYLES.get(state, "cyan")), f"  step {run.step}/{run.steps}{time_left(run)}")
    if run.reason:
        line.append(f"  {run.reason}", style="dim")
    grid = Table.grid(padding=(0, 2))
    grid.add_row(line, ProgressBar(total=max(run.steps, 1), completed=run.step, width=30))
    rewards = [view.steps[step]["reward_mean"] for step in sorted(view.steps) if "reward_mean" in view.steps[step]]
    curve = Text.assemble("reward ", (sparkline(rewards[-60:]) or "·", "green"))
    if "eval_accuracy" in run.metrics:
        curve.append(f"   held-out accuracy {run.metrics['eval_accuracy']:.2f}", style="bold")
    parts: list[RenderableType] = [grid, curve]
    if run.waiting_for:
        parts.append(Text(run.waiting_for, "yellow"))
    return Group(*parts)


def _steps_table(view: RunView) -> Table:
    recent = sorted(view.steps)[-SHOWN_STEPS:]
    columns = [column for column in COLUMNS if any(column[1] in view.steps[step] for step in recent)]
    table = Table("step", *(title for title, _, _ in columns), box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in table.columns:
        column.justify = "right"
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


def samples_table(samples: Sequence[pb.TrainedSample], *, title: str = "") -> Table:
    """List samples, one per row."""
    table = Table(
        title=title or None, title_justify="left", title_style="dim", box=None, header_style="dim", padding=(0, 2, 0, 0)
    )
    table.add_column("step", justify="right")
    table.add_column("version", justify="right")
    table.add_column("prompt", overflow="fold", max_width=48)
    table.add_column("response", overflow="fold", max_width=48)
    table.add_column("answer", overflow="fold", max_width=24)
    table.add_column("reward", justify="right")
    table.add_column("advantage", justify="right")
    for sample in samples:
        style = "green" if sample.advantage > 0 else "red" if sample.advantage < 0 else None
        table.add_row(
            str(sample.step),
            str(sample.version),
            _printable(sample.prompt),
            _printable(sample.response) or "(nothing)",
            _printable(sample.answer),
            f"{sample.reward:.2f}",
            Text(f"{sample.advantage:+.2f}", style=style or ""),
        )
    return table


def _printable(text: str) -> Text:
    """Put a model's text on one line and replace control characters."""
    return Text("".join(character if character.isprintable() else "·" for character in " ".join(text.split())))
