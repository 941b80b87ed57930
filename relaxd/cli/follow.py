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

QUIET_SECONDS = 600.0
"""How often it is said that nothing changes in a run."""
SHOWN_SAMPLES = 4


class RunPaused(CliError):
    """A run has been paused for longer than it is waited for."""


def follow(
    coordinator: Coordinator,
    run_id: str,
    console: Console,
    *,
    healthy: Callable[[], None] = lambda: None,
    longest_pause: float = float("inf"),
    away_seconds: float = AWAY_SECONDS,
) -> RunView:
    """Show a run until it ends, however long that takes; live on a terminal, a line a step elsewhere.

    Args:
        coordinator: who knows the run.
        run_id: the run.
        console: where to show it.
        healthy: called about once a second; raises CliError when there is no point in going on.
        longest_pause: seconds for which a paused run is waited for.
        away_seconds: for how long a coordinator that doesn't answer is waited for.

    Raises RunPaused, and CliError: the run failed, or the coordinator is gone.
    """
    view = RunView()
    if console.is_terminal:
        live = Live(render(view), console=console, refresh_per_second=4, transient=False)
        follower = _Follower(coordinator, run_id, view, console, lambda: live.update(render(view)), healthy)
        with live:
            follower.run(longest_pause, away_seconds)
    else:
        lines = _Lines(view, console)
        _Follower(coordinator, run_id, view, console, lines.print_news, healthy).run(longest_pause, away_seconds)
    if view.run.state == pb.RUN_STATE_FAILED:
        raise CliError(f"run {view.run.run_id} failed: {view.run.reason}")
    return view


class _Follower:
    """Follows one run, and says what a person should know besides what is shown."""

    def __init__(
        self,
        coordinator: Coordinator,
        run_id: str,
        view: RunView,
        console: Console,
        show: Callable[[], None],
        healthy: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._run_id = run_id
        self._view = view
        self._console = console
        self._show = show
        self._healthy = healthy
        self._quiet = Quiet(time.monotonic())
        self._paused_since: float | None = None

    def run(self, longest_pause: float, away_seconds: float) -> None:
        """Follow it to its end."""
        with _interrupts() as interrupted:
            for response in self._coordinator.watch(self._run_id, self._while_away, away_seconds):
                if interrupted.is_set():
                    raise KeyboardInterrupt
                if self._view.update(response):
                    with contextlib.suppress(CliError):  # a coordinator that restarts just now shows the next ones
                        self._view.samples = self._coordinator.samples(self._run_id, limit=SHOWN_SAMPLES)
                self._show()
                self._healthy()
                now = time.monotonic()
                self._say(self._quiet.look(response.run, now))
                self._look_at_pause(response.run, now, longest_pause)

    def _while_away(self) -> None:
        self._healthy()
        self._say(self._quiet.nobody_answers(time.monotonic()))

    def _look_at_pause(self, run: pb.Run, now: float, longest_pause: float) -> None:
        rebuilding = any(one.state == HEALTH_STATE_REBUILDING for one in run.health)  # which ends by itself
        if run.state != pb.RUN_STATE_PAUSED or rebuilding:
            self._paused_since = None
            return
        if self._paused_since is None:
            self._paused_since = now
            self._say(f"relaxd resume {run.run_id} goes on with it, relaxd stop {run.run_id} ends it")
        if now - self._paused_since > longest_pause:
            raise RunPaused(f"run {run.run_id} has been paused for {longest_pause:.0f} s: {run.reason}")

    def _say(self, text: str) -> None:
        if text:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Quiet:
    """Tells now and then that nothing changes, and why. Times are monotonic."""

    def __init__(self, now: float) -> None:
        self._face = ""
        self._changed = self._told = now

    def look(self, run: pb.Run, now: float) -> str:
        """What to say about a run that was just seen; mostly nothing."""
        face = f"{run.state} {run.reason} {run.step} {run.groups}"
        if face != self._face:
            self._face, self._changed, self._told = face, now, now
        why = run.reason or f"step {run.step + 1} of {run.steps} goes on"
        return self._in_time(f"nothing has changed in run {run.run_id}", why, now)

    def nobody_answers(self, now: float) -> str:
        """The same while there is no coordinator."""
        return self._in_time("nothing has been heard of the run", "the coordinator does not answer", now)

    def _in_time(self, what: str, why: str, now: float) -> str:
        if now - self._told < QUIET_SECONDS:
            return ""
        self._told = now
        return f"{what} for {(now - self._changed) / 60:.0f} min: {why}"


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
