"""Following a run until it ends."""

import contextlib
import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from relaxd.cli.reading.live_view import Picture, RunView, evaluation_line, event_line, step_line, time_left
from relaxd.client import CliError, RunFailedError
from relaxd.client.coordinator_client import AWAY_SECONDS, state_name
from relaxd.client.folder_runs import RunReader
from relaxd.reasons import DropWatch
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HEALTH_STATE_REBUILDING
from relaxd.waiting import duration

QUIET_SECONDS = 30.0
"""Maximum time between two printed lines about a run, in seconds, if the output is not a terminal."""
SHOWN_SAMPLES = 4


class RunPaused(CliError):
    """The run has been paused for longer than the `max_pause` of `follow`."""


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM, which is handled like Ctrl-C."""


class HungUp(Terminated):
    """The terminal was closed: SIGHUP arrived, or a write to the terminal failed first.

    From then on, output is discarded and SIGHUP is ignored.
    """


def interrupt_code(error: KeyboardInterrupt) -> int:
    """Return the exit code of a command that a signal ended: 128 and the signal's number."""
    if isinstance(error, HungUp):
        return 128 + signal.SIGHUP
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def follow(
    coordinator: RunReader,
    run_id: str,
    console: Console,
    *,
    healthy: Callable[[], None] = lambda: None,
    max_pause: float = float("inf"),
    away_seconds: float = AWAY_SECONDS,
    old_drops: bool = True,
) -> RunView:
    """Show a run until it ends: live on a terminal, one line per step elsewhere.

    Args:
        coordinator: the run's coordinator, or the folders of runs.
        run_id: the run; "" is the newest.
        console: the output.
        healthy: called about once a second; raises CliError to stop following.
        max_pause: seconds to wait for a paused run.
        away_seconds: seconds to wait for a coordinator that doesn't answer.
        old_drops: True to also warn of groups that were dropped before this call.

    Raises RunPaused, CliError: the run failed, or the coordinator is gone; KeyboardInterrupt; Terminated.
    """
    view = RunView()
    if console.is_terminal:
        # Use the alternate screen: a resized terminal wraps lines, and a display in place would leave pieces of them.
        live = Live(Picture(view), console=console, refresh_per_second=4, screen=True)
        follower = Follower(coordinator, run_id, view, view.notices.append, healthy, lines=False, old_drops=old_drops)

        def refresh() -> None:
            if not console.is_terminal:  # rich writes nothing to a closed terminal, so that no write fails
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            live.refresh()

        try:
            with live:
                follower.run(refresh, max_pause, away_seconds)
        finally:
            console.print(Picture(view))
    else:
        follower = Follower(coordinator, run_id, view, _printer(console), healthy, lines=True, old_drops=old_drops)
        follower.run(_Lines(view, follower.say).print_news, max_pause, away_seconds)
    if view.run.state == pb.RUN_STATE_FAILED:
        raise RunFailedError(view.run)
    return view


class Follower:
    """Follows one run, and prints notices of alarms, dropped groups, pauses and waits."""

    def __init__(
        self,
        coordinator: RunReader,
        run_id: str,
        view: RunView,
        say: Callable[[str], None],
        healthy: Callable[[], None],
        *,
        lines: bool,
        after_step: int | None = None,
        old_drops: bool = True,
    ) -> None:
        """`say`: prints a line. `lines`: True if the output is only lines; then one comes at least every QUIET_SECONDS.

        `after_step`: step after which steps are shown; None: only new steps.
        `old_drops`: as in `follow`.
        """
        self._coordinator = coordinator
        self._run_id = run_id
        self._view = view
        self._print = say
        self._healthy = healthy
        self._lines = lines
        self._after_step = after_step
        self._quiet = Quiet(time.monotonic())
        self._drops = DropWatch() if old_drops else None
        """Watches the numbers of dropped groups; None until the first message tells the numbers to count from."""
        self._alarms: set[tuple[int, str, int]] = set()
        """Kind, name and first step of each open alarm that was printed."""
        self._advised: tuple[int, str] | None = None
        """Kind and subject of the run's current wait, whose advice was printed; None if there is no advice."""
        self._paused_since: float | None = None

    def run(self, show: Callable[[], None], max_pause: float, away_seconds: float) -> None:
        """Follow the run until it ends. Calls `show` to redraw the view after each message of the coordinator."""
        with _interrupts() as interrupts, _hang_ups():
            for response in self._coordinator.watch(self._run_id, self._while_away, away_seconds, self._after_step):
                interrupts.check()
                if self._view.update(response):
                    with contextlib.suppress(CliError):  # the coordinator is restarting: show the next ones
                        self._view.samples = self._coordinator.samples(self._run_id, limit=SHOWN_SAMPLES)
                show()
                self._healthy()
                run, now = response.run, time.monotonic()
                if self._drops is None:
                    self._drops = DropWatch(run.groups.dropped_by_reason, run.groups.published)
                for warning in self._drops.observe(run.groups.dropped_by_reason, run.groups.published):
                    self.say(f"warning: {warning}")
                self._tell_alarms(run)
                self._tell_advice(run)
                if self._lines:
                    self.say(self._quiet.observe(run, now))
                self._check_pause(run, now, max_pause)

    def say(self, text: str) -> None:
        """Print a line about the run, unless the text is empty."""
        if text:
            self._quiet.spoke(time.monotonic())
            self._print(text)

    def _tell_alarms(self, run: pb.Run) -> None:
        """Print a warning for each alarm of the run that has begun since the last call."""
        alarms = {(alarm.kind, alarm.name, alarm.first_step): alarm for alarm in run.alarms}
        for key, alarm in alarms.items():
            if key not in self._alarms:
                self.say(f"warning: since step {alarm.first_step}: {alarm.text}")
        self._alarms = set(alarms)

    def _tell_advice(self, run: pb.Run) -> None:
        """Print what the run waits for and the advice on it, once for each wait."""
        wait = (run.wait.kind, run.wait.on)
        if run.state in (pb.RUN_STATE_PENDING, pb.RUN_STATE_RUNNING) and run.wait.advice and wait != self._advised:
            self.say(f"run {run.run_id}: {run.waiting_for}: {'; '.join(run.wait.advice)}")
        self._advised = wait if run.wait.advice else None

    def _while_away(self, reason: str) -> None:
        self._healthy()
        self.say(self._quiet.observe_silence(reason, time.monotonic()))

    def _check_pause(self, run: pb.Run, now: float, max_pause: float) -> None:
        rebuilding = any(one.state == HEALTH_STATE_REBUILDING for one in run.health)  # a rebuild's pause ends by itself
        if run.state != pb.RUN_STATE_PAUSED or rebuilding:
            self._paused_since = None
            return
        if self._paused_since is None:
            self._paused_since = now
            self.say(f"relaxd resume {run.run_id} continues it, relaxd stop {run.run_id} ends it")
        if now - self._paused_since > max_pause:
            raise RunPaused(f"run {run.run_id} has been paused for {max_pause:.0f} s: {run.reason}")


class Quiet:
    """Returns a progress line if no line was printed for QUIET_SECONDS. Times are monotonic, in seconds."""

    def __init__(self, now: float) -> None:
        self._spoke = self._heard = now

    def spoke(self, now: float) -> None:
        """Record that a line was printed."""
        self._spoke = now

    def observe(self, run: pb.Run, now: float) -> str:
        """Return a progress line about the run if no line was printed for QUIET_SECONDS, else ""."""
        self._heard = now
        if now - self._spoke < QUIET_SECONDS:
            return ""
        what = run.waiting_for or run.reason or f"step {run.step + 1} of {run.steps} is in progress"
        return f"run {run.run_id}: {what}{time_left(run)}"

    def observe_silence(self, reason: str, now: float) -> str:
        """Return a line that says why the coordinator is silent; "" if a line was printed within QUIET_SECONDS."""
        if now - self._spoke < QUIET_SECONDS:
            return ""
        return f"no news of the run for {duration(now - self._heard)}: the coordinator answers nothing: {reason}"


@contextlib.contextmanager
def _interrupts() -> Iterator["_Interrupts"]:
    """Yield a record of Ctrl-C, SIGTERM and SIGHUP, which also raise KeyboardInterrupt, Terminated and HungUp.

    The record is needed because Python only prints an exception that is raised in a destructor or a gRPC callback.
    SIGTERM must not end the process at once, because the live display must first restore the terminal. An ignored
    SIGHUP, as under nohup, stays ignored.
    """
    interrupts = _Interrupts()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield interrupts
        return
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, interrupts.note) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # it hung up
                signal.signal(number, handler)


@contextlib.contextmanager
def _hang_ups() -> Iterator[None]:
    """Convert the error of a write to a closed terminal to HungUp."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()
        raise HungUp from None


class _Interrupts:
    """Records which of Ctrl-C, SIGTERM and SIGHUP came last, if any."""

    def __init__(self) -> None:
        self._came: type[KeyboardInterrupt] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: record the signal and raise the exception for it."""
        if number == signal.SIGHUP:
            leave_terminal()
            self._came = HungUp
        else:
            self._came = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        raise self._came

    def check(self) -> None:
        """Raise the exception of the recorded signal again, if a signal has arrived."""
        if self._came is not None:
            raise self._came


def leave_terminal() -> None:
    """Ignore SIGHUP from now on, and redirect standard streams that aren't files to /dev/null, so that writes succeed.

    A closed terminal causes SIGHUP twice, from its shell and from the kernel, and the end of a run takes longer.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if not stat.S_ISREG(os.fstat(number).st_mode):
                os.dup2(nowhere, number)
    os.close(nowhere)


class _Lines:
    """Prints each change of a followed run as a line, for logs and pipes."""

    def __init__(self, view: RunView, say: Callable[[str], None]) -> None:
        self._view, self._say = view, say
        self._printed: set[int] = set()
        self._told_events = 0
        self._state = ""
        self._wait = pb.WAIT_KIND_UNSPECIFIED
        self._evaluation: dict[str, float] = {}

    def print_news(self) -> None:
        """Print the run's steps, health events, evaluation and state that haven't been printed yet."""
        run = self._view.run
        for step in sorted(self._view.steps.keys() - self._printed):
            self._say(step_line(step, run.steps, self._view.steps[step]))
            self._printed.add(step)
        for event in self._view.events:
            if event.number > self._told_events:
                self._say(event_line(event))
                self._told_events = event.number
        evaluation = {name: value for name, value in run.metrics.items() if name.startswith(("eval_", "eval/"))}
        if evaluation != self._evaluation and "eval_step" in evaluation:
            step = int(evaluation["eval_step"])
            when = f"after step {step}" if step else "before training"
            self._say(evaluation_line(evaluation, when))
            self._evaluation = evaluation
        state = state_name(run.state) + (f": {run.reason}" if run.reason else "")
        if state != self._state:
            self._say(f"run {run.run_id} is {state}")
            self._state = state
        # `waiting_for` ends with a growing duration, so print it only when the kind of wait changes.
        # Other states than running have a reason.
        kind = run.wait.kind if run.state == pb.RUN_STATE_RUNNING else pb.WAIT_KIND_UNSPECIFIED
        if kind != self._wait:
            self._say(f"run {run.run_id}: {run.waiting_for}" if kind else "")
            self._wait = kind


def _printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line unchanged."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
