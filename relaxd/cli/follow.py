"""Watching a run until it ends."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from relaxd.cli.coordinator import AWAY_SECONDS, Coordinator, state_name
from relaxd.cli.errors import CliError
from relaxd.cli.view import RunView, evaluation_line, event_line, render, step_line
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HEALTH_STATE_REBUILDING

STALLED_SECONDS = 900.0
"""A run in which nothing at all changes for this long is given up."""
SHOWN_SAMPLES = 4


def follow(
    coordinator: Coordinator,
    run_id: str,
    console: Console,
    *,
    healthy: Callable[[], None] = lambda: None,
    longest_pause: float = float("inf"),
) -> RunView:
    """Show a run until it ends; live on a terminal, a line a step elsewhere.

    `healthy` is called about once a second and raises CliError when there is no point in going on. A run that stays
    paused for more than `longest_pause` seconds is an error, because nobody seems to be there to resume it.
    Raises CliError: the run failed, paused, or stalled; the coordinator is gone.
    """
    view = RunView()
    if console.is_terminal:
        with Live(render(view), console=console, refresh_per_second=4, transient=False) as live:
            _loop(coordinator, run_id, view, lambda: live.update(render(view)), healthy, longest_pause)
    else:
        _loop(coordinator, run_id, view, _Lines(view, console).print_news, healthy, longest_pause)
    if view.run.state == pb.RUN_STATE_FAILED:
        raise CliError(f"run {view.run.run_id} failed: {view.run.reason}")
    return view


def _loop(
    coordinator: Coordinator,
    run_id: str,
    view: RunView,
    show: Callable[[], None],
    healthy: Callable[[], None],
    longest_pause: float,
) -> None:
    last, changed = "", time.monotonic()
    with _interrupts() as interrupted:
        for response in coordinator.watch(run_id, while_away=healthy):
            if interrupted.is_set():
                raise KeyboardInterrupt
            if view.update(response):
                view.samples = coordinator.samples(run_id, limit=SHOWN_SAMPLES, patience_seconds=AWAY_SECONDS)
            show()
            healthy()
            run, now = view.run, time.monotonic()
            if (seen := f"{state_name(run.state)} {run.reason} {run.step} {run.groups}") != last:
                last, changed = seen, now
            paused = run.state == pb.RUN_STATE_PAUSED
            rebuilding = any(one.state == HEALTH_STATE_REBUILDING for one in run.health)  # which ends by itself
            if paused and not rebuilding and now - changed > longest_pause:
                raise CliError(f"run {run.run_id} is paused: {run.reason}")
            if not paused and now - changed > STALLED_SECONDS:
                raise CliError(f"nothing has happened in run {run.run_id} for {STALLED_SECONDS:.0f} s: giving it up")


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set at Ctrl-C, which also raises KeyboardInterrupt as ever.

    Where Python is within a destructor or a callback of gRPC's just then, it prints the exception and goes on.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals only ever come to that one
        yield interrupted
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class _Lines:
    """Prints what is new, for logs and pipes."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view, self._console = view, console
        self._printed: set[int] = set()
        self._told_events = 0
        self._state = ""
        self._evaluation: dict[str, float] = {}

    def print_news(self) -> None:
        """Print the steps, the evaluation and the state that weren't printed yet."""
        run = self._view.run
        for step in sorted(self._view.steps.keys() - self._printed):
            self._print(step_line(step, run.steps, self._view.steps[step]))
            self._printed.add(step)
        for event in self._view.events:
            if event.number > self._told_events:
                self._print(event_line(event))
                self._told_events = event.number
        evaluation = {name: value for name, value in run.metrics.items() if name.startswith("eval_")}
        if evaluation != self._evaluation and "eval_accuracy" in evaluation:
            step = int(evaluation["eval_step"])
            when = f"after step {step}" if step else "before training"
            self._print(evaluation_line(evaluation, when))
            self._evaluation = evaluation
        state = state_name(run.state) + (f": {run.reason}" if run.reason else "")
        if state != self._state:
            self._print(f"run {run.run_id} is {state}")
            self._state = state

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
