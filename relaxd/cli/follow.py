"""Following a run until it ends."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from relaxd.cli.view import Picture, RunView, evaluation_line, event_line, step_line
from relaxd.client.coordinator import AWAY_SECONDS, state_name
from relaxd.client.errors import CliError
from relaxd.client.folder_runs import RunReader
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HEALTH_STATE_REBUILDING

QUIET_SECONDS = 600.0
"""Interval of notices that a run does not change."""
SHOWN_SAMPLES = 4


class RunPaused(CliError):
    """The run has been paused for longer than `max_pause`."""


def follow(
    coordinator: RunReader,
    run_id: str,
    console: Console,
    *,
    healthy: Callable[[], None] = lambda: None,
    max_pause: float = float("inf"),
    away_seconds: float = AWAY_SECONDS,
) -> RunView:
    """Show a run until it ends: live on a terminal, one line per step elsewhere.

    Args:
        coordinator: the run's coordinator, or the folders of runs.
        run_id: the run; "" is the newest.
        console: the output.
        healthy: called about once a second; raises CliError to stop following.
        max_pause: seconds to wait for a paused run.
        away_seconds: seconds to wait for a coordinator that doesn't answer.

    Raises RunPaused, and CliError: the run failed, or the coordinator is gone.
    """
    view = RunView()
    if console.is_terminal:
        # On a screen of its own: a resized terminal wraps lines, of which a display in place would leave pieces behind.
        live = Live(Picture(view), console=console, refresh_per_second=4, screen=True)
        try:
            with live:
                _Follower(coordinator, run_id, view, view.notices.append, live.refresh, healthy).run(
                    max_pause, away_seconds
                )
        finally:
            console.print(Picture(view))
    else:
        lines = _Lines(view, console)
        _Follower(coordinator, run_id, view, lines.print, lines.print_news, healthy).run(max_pause, away_seconds)
    if view.run.state == pb.RUN_STATE_FAILED:
        raise CliError(f"run {view.run.run_id} failed: {view.run.reason}")
    return view


class _Follower:
    """Follows one run, and prints notices of pauses and standstill."""

    def __init__(
        self,
        coordinator: RunReader,
        run_id: str,
        view: RunView,
        say: Callable[[str], None],
        show: Callable[[], None],
        healthy: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._run_id = run_id
        self._view = view
        self._print = say
        self._show = show
        self._healthy = healthy
        self._quiet = Quiet(time.monotonic())
        self._paused_since: float | None = None

    def run(self, max_pause: float, away_seconds: float) -> None:
        """Follow the run to its end."""
        with _interrupts() as interrupted:
            for response in self._coordinator.watch(self._run_id, self._while_away, away_seconds):
                if interrupted.is_set():
                    raise KeyboardInterrupt
                if self._view.update(response):
                    with contextlib.suppress(CliError):  # the coordinator is restarting: show the next ones
                        self._view.samples = self._coordinator.samples(self._run_id, limit=SHOWN_SAMPLES)
                self._show()
                self._healthy()
                now = time.monotonic()
                self._say(self._quiet.observe(response.run, now))
                self._check_pause(response.run, now, max_pause)

    def _while_away(self) -> None:
        self._healthy()
        self._say(self._quiet.observe_silence(time.monotonic()))

    def _check_pause(self, run: pb.Run, now: float, max_pause: float) -> None:
        rebuilding = any(one.state == HEALTH_STATE_REBUILDING for one in run.health)  # a rebuild's pause ends by itself
        if run.state != pb.RUN_STATE_PAUSED or rebuilding:
            self._paused_since = None
            return
        if self._paused_since is None:
            self._paused_since = now
            self._say(f"relaxd resume {run.run_id} continues it, relaxd stop {run.run_id} ends it")
        if now - self._paused_since > max_pause:
            raise RunPaused(f"run {run.run_id} has been paused for {max_pause:.0f} s: {run.reason}")

    def _say(self, text: str) -> None:
        if text:
            self._print(text)


class Quiet:
    """Makes notices that a run does not change, and why. Times are monotonic."""

    def __init__(self, now: float) -> None:
        self._face = ""
        self._changed = self._told = now

    def observe(self, run: pb.Run, now: float) -> str:
        """Return a notice about the run if one is due, else ""."""
        face = f"{run.state} {run.reason} {run.step} {run.groups}"
        if face != self._face:
            self._face, self._changed, self._told = face, now, now
        why = run.reason or f"step {run.step + 1} of {run.steps} is in progress"
        return self._notice(f"nothing has changed in run {run.run_id}", why, now)

    def observe_silence(self, now: float) -> str:
        """Return a notice that the coordinator does not answer if one is due, else ""."""
        return self._notice("no news of the run", "the coordinator does not answer", now)

    def _notice(self, what: str, why: str, now: float) -> str:
        if now - self._told < QUIET_SECONDS:
            return ""
        self._told = now
        return f"{what} for {(now - self._changed) / 60:.0f} min: {why}"


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets besides raising KeyboardInterrupt.

    Python only prints a KeyboardInterrupt that is raised within a destructor or a gRPC callback.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
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
    """Prints changes line by line, for logs and pipes."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view, self._console = view, console
        self._printed: set[int] = set()
        self._told_events = 0
        self._state = ""
        self._evaluation: dict[str, float] = {}

    def print_news(self) -> None:
        """Print the steps, events, evaluation and state not printed yet."""
        run = self._view.run
        for step in sorted(self._view.steps.keys() - self._printed):
            self.print(step_line(step, run.steps, self._view.steps[step]))
            self._printed.add(step)
        for event in self._view.events:
            if event.number > self._told_events:
                self.print(event_line(event))
                self._told_events = event.number
        evaluation = {name: value for name, value in run.metrics.items() if name.startswith("eval_")}
        if evaluation != self._evaluation and "eval_reward" in evaluation:
            step = int(evaluation["eval_step"])
            when = f"after step {step}" if step else "before training"
            self.print(evaluation_line(evaluation, when))
            self._evaluation = evaluation
        state = state_name(run.state) + (f": {run.reason}" if run.reason else "")
        if state != self._state:
            self.print(f"run {run.run_id} is {state}")
            self._state = state

    def print(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
