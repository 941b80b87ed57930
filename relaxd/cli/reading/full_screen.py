"""The full screen of `relaxd watch`: flow, curve, why and alarms of a run, with textual."""

import asyncio
import math
import signal
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Static

from relaxd.cli.reading.follow import Follower, leave_terminal
from relaxd.cli.reading.live_view import BARS, Picture, RunView, head, news, samples_table, steps_table
from relaxd.client import CliError, RunFailedError
from relaxd.client.coordinator_client import AWAY_SECONDS
from relaxd.client.folder_runs import RunReader
from relaxd.telemetry.logs import escape_lines
from relaxd.v1 import coordinator_pb2 as pb

CURVE_STEPS = 1000
"""Maximum number of steps from before the command started that the curve shows."""
CURVES = (
    "reward_mean",
    "response_length_mean",
    "entropy",
    "kl",
    "loss",
    "grad_norm",
    "tokens_per_second",
    "step_seconds",
)
"""Names of the metrics whose curves can be shown; metrics that a run lacks are left out."""
BAR_WIDTH = 12


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draw a curve of values over the whole width; a column shows the mean of its values. Returns rows, top first."""
    if not values or width < 1 or height < 1:
        return []
    ends = [len(values) * column // width for column in range(width + 1)]
    means = [statistics.fmean(values[start : max(start + 1, end)]) for start, end in pairwise(ends)]
    low, high = min(means), max(means)
    eighths = [round((value - low) / ((high - low) or 1.0) * (8 * height - 1)) + 1 for value in means]
    return [
        "".join(
            " " if filled <= 8 * row else BARS[min(filled - 8 * row, 8) - 1]
            for filled in eighths
        )
        for row in reversed(range(height))
    ]  # fmt: skip


def flow(run: pb.Run) -> RenderableType:
    """Return a bar for each stage, of its waiting and held groups, and the numbers of closed groups."""
    table = Table.grid(padding=(0, 1))
    longest = max([1, *(queue.waiting + queue.held for queue in run.queues)])
    for queue in run.queues:
        held, waiting = (round(BAR_WIDTH * count / longest) for count in (queue.held, queue.waiting))
        bar = Text.assemble(("█" * held, "green"), ("░" * waiting, "yellow"))
        table.add_row(queue.stage, bar, Text(f"{queue.held} held, {queue.waiting} waiting", "dim"))
    groups = run.groups
    counts = f"published {groups.published}  open {groups.open}  trained {groups.trained}  dropped {groups.dropped}"
    reasons = sorted(groups.dropped_by_reason.items(), key=lambda item: -item[1])
    dropped = Text("\n".join(f"dropped as {reason}: {count}" for reason, count in reasons), "dim")
    return Group(table, Text(counts), dropped)


def why(run: pb.Run) -> Text:
    """Show what the run waits for, with the known facts and advice."""
    text = Text(run.waiting_for or run.reason or "nothing holds it up", "yellow" if run.waiting_for else "")
    for line in run.wait.evidence:
        text.append(f"\n· {line}", "dim")
    for line in run.wait.advice:
        text.append(f"\n→ {line}", "bold")
    return text


def alarms(view: RunView) -> RenderableType:
    """List the open alarms, then the newest events, and notices that the screen doesn't show elsewhere."""
    elsewhere = (*(one.text for one in view.run.alarms), *view.run.wait.advice)
    view = replace(view, notices=[one for one in view.notices if not one.endswith(elsewhere)])
    found = [Text(f"since step {one.first_step}: {one.text}", "bold yellow") for one in view.run.alarms]
    return Group(*(found or [Text("no alarm", "green")]), *news(view))


class WatchApp(App[int]):
    """Shows one run until it ends or somebody quits. Its result is an exit code."""

    TITLE = "relaxd"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    .row { height: auto; max-height: 45%; }
    .panel { border: round $primary; padding: 0 1; width: 1fr; height: auto; max-height: 100%; }
    #head { height: auto; padding: 0 1; }
    #curve { border: round $primary; padding: 0 1; height: 10; }
    #below { height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit_with(0)", "quit"),
        Binding("ctrl+c", "quit_with(130)", "quit", show=False, priority=True),
        Binding("m", "next_curve", "next curve"),
        Binding("s", "samples", "samples or steps"),
    ]

    def __init__(self, reader: RunReader, run: pb.Run, healthy: Callable[[], None], *, signals: bool = False) -> None:
        """`run`: the run at the start. `signals`: exit on SIGTERM and SIGHUP with the terminal restored."""
        super().__init__()
        self.view = RunView(run=run)
        self.error: CliError | None = None
        """Error because of which the run could not be followed to its end; None without an error."""
        self._signals = signals
        self._curve = CURVES[0]
        self._shows_samples = False
        self._follower = Follower(
            reader,
            run.run_id,
            self.view,
            self.view.notices.append,
            healthy,
            lines=False,
            after_step=max(0, run.step - CURVE_STEPS),
        )

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Horizontal(classes="row"):
            yield _panel("flow")
            yield _panel("why")
            yield _panel("alarms")
        yield Static(id="curve")
        with VerticalScroll(id="below"):
            yield Static(id="table")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow the run, in a thread."""
        if self._signals:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, self.exit, 128 + signal.SIGTERM)
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self.redraw()
        threading.Thread(target=self._follow, name="follower", daemon=True).start()

    def on_resize(self) -> None:
        """Redraw everything for the terminal's new size."""
        self.call_after_refresh(self.redraw)

    def action_quit_with(self, code: int) -> None:
        """End the screen with this exit code; the run goes on."""
        self.exit(code)

    def action_next_curve(self) -> None:
        """Show the curve of the next metric that the run has."""
        known = [name for name in CURVES if any(name in metrics for metrics in self.view.steps.values())]
        if known:
            self._curve = known[(known.index(self._curve) + 1) % len(known)] if self._curve in known else known[0]
        self.redraw()

    def action_samples(self) -> None:
        """Switch the table between recent samples and steps."""
        self._shows_samples = not self._shows_samples
        self.redraw()

    def redraw(self) -> None:
        """Redraw all parts of the screen from the run's current state."""
        view, room = self.view, self.query_one("#below").content_size.height
        parts = {"head": head(view), "flow": flow(view.run), "why": why(view.run), "alarms": alarms(view)}
        parts["table"] = (
            samples_table(view.samples, one_line=True) if self._shows_samples else steps_table(view, max(1, room - 1))
        )
        for name, content in parts.items():
            self.query_one(f"#{name}", Static).update(_Escaped(content))
        self._draw_curve()

    def _draw_curve(self) -> None:
        place, steps = self.query_one("#curve", Static), self.view.steps
        known = [step for step in sorted(steps) if math.isfinite(steps[step].get(self._curve, math.nan))]
        values = [steps[step][self._curve] for step in known]
        place.border_title = self._curve
        if values:
            place.border_subtitle = f"steps {known[0]} to {known[-1]}, {min(values):.4g} to {max(values):.4g}"
        rows = curve(values, place.content_size.width, place.content_size.height)
        place.update(Text("\n".join(rows), "green") if rows else Text("it comes with the first step", "dim"))

    def _follow(self) -> None:
        """Body of the thread that follows the run: redraw after each message, and exit when the run ends."""
        try:
            self._follower.run(lambda: self._from_thread(self.redraw), float("inf"), AWAY_SECONDS)
        except CliError as error:
            self.error = error
        except _Closed:
            return
        try:
            self._from_thread(self.exit, 0)
        except _Closed:
            return

    def _from_thread(self, call: Callable[..., None], *arguments: int) -> None:
        """Call a function in the app's thread and wait until it returns. Raises _Closed if the app has ended."""
        if not self.is_running:
            raise _Closed
        try:
            self.call_from_thread(call, *arguments)
        except RuntimeError as error:  # it has ended meanwhile
            raise _Closed from error

    def _hang_up(self) -> None:
        leave_terminal()
        self.exit(128 + signal.SIGHUP)


class _Escaped:
    """Renders content with control characters escaped, because texts come from models and exceptions."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._shown, options):
            yield Segment(escape_lines(segment.text), segment.style)


class _Closed(Exception):
    """The app has ended, so nothing can be called in its thread any more."""


def _panel(name: str) -> VerticalScroll:
    panel = VerticalScroll(Static(id=name), classes="panel")
    panel.border_title = name
    return panel


def follow_full_screen(reader: RunReader, run: pb.Run, console: Console, healthy: Callable[[], None]) -> None:
    """Show a run on the whole screen until it ends, and then its last picture.

    Raises CliError: the run failed, or the coordinator is gone; typer.Exit: a signal or Ctrl-C ended it.
    """
    app = WatchApp(reader, run, healthy, signals=True)
    code = app.run()
    if code is not None and code != 128 + signal.SIGHUP:
        console.print(Picture(app.view))
    if app.error is not None:
        raise app.error
    if app.view.run.state == pb.RUN_STATE_FAILED:
        raise RunFailedError(app.view.run)
    if code:
        raise typer.Exit(code)
