"""The trackers' process: `python -m relaxd.trackers`, started by the coordinator.

Its first line of input is the run as JSON: run_id, folder, the section [tracking], and the section [alerts] if there
are addresses to notify. Each further line is the run's status, as JSON. The line "end" means that the run has ended;
the end of the input means that the coordinator has ended. It prints lines of JSON: a tracker or notifier, and its
problem.
"""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from relaxd.alerts.urls import VARIABLE, UrlProblem, read_urls
from relaxd.run_folder import CODE, CONFIG
from relaxd.trackers.feed import FOLDER, Feed
from relaxd.trackers.notifier import Notifier
from relaxd.trackers.tracker import TrackedRun, redact

CHECK_SECONDS = 1.0
END_SECONDS = 60.0
"""Seconds for trackers to send remaining data after the end of the run or the coordinator."""


class Reports:
    """Writes the problem of each tracker and notifier, "" for none, whenever it changes."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._problems: dict[tuple[str, str], str] = {}

    def set(self, kind: str, name: str, problem: str) -> None:
        """Set the problem of a "tracker" or "notifier", "" if it works; it is written only if it changed."""
        with self._lock:
            if self._problems.get((kind, name)) != problem:
                self._problems[kind, name] = problem
                with contextlib.suppress(OSError):  # the coordinator has ended
                    print(json.dumps({kind: name, "problem": problem}), file=self._output, flush=True)


def tracked_run(given: dict[str, Any]) -> TrackedRun:
    """Return the run that the coordinator names. Raises OSError: its folder can't be read."""
    folder, settings = Path(given["folder"]), given["tracking"]
    code = folder / CODE
    return TrackedRun(
        run_id=given["run_id"],
        folder=folder,
        name=settings["name"] or given["run_id"],
        project=settings["project"],
        config=redact(json.loads((folder / CONFIG).read_text())),
        code=json.loads(code.read_text()) if code.is_file() else {},
        settings=settings,
    )


def make_notifiers(given: dict[str, Any], folder: Path, reports: Reports) -> list[Notifier]:
    """Return a notifier for each address, and remove the addresses' secrets from the environment, so that no tracker
    finds them."""
    settings = given.get("alerts")
    environment = {VARIABLE: os.environ.pop(VARIABLE, "")}
    if settings is None:
        return []
    try:
        urls = read_urls(settings["urls_file"], environment)
    except UrlProblem as problem:
        reports.set("notifier", "", str(problem))
        return []
    report = partial(reports.set, "notifier")
    return [Notifier(url, given["run_id"], folder, settings, report) for url in urls]


def run_trackers(given: dict[str, Any], reports: Reports) -> None:
    """Feed a run's trackers and notifiers until the input ends, and for up to END_SECONDS longer."""
    run = tracked_run(given)
    notifiers = make_notifiers(given, run.folder, reports)
    feeds = [Feed(name, run, partial(reports.set, "tracker")) for name in run.settings["trackers"]]
    ending = threading.Event()

    def await_end() -> None:
        run_ended = False
        while not run_ended and (line := sys.stdin.readline()):
            run_ended = line.strip() == "end"
            for notifier in () if run_ended else notifiers:
                notifier.tell(json.loads(line))
        for notifier in notifiers:
            notifier.end()
        for feed in feeds:
            feed.end(run_ended=run_ended)
        ending.set()

    threading.Thread(target=await_end, daemon=True).start()
    lock = run.folder / FOLDER / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if ending.wait(CHECK_SECONDS):  # brief: the process of an earlier coordinator ends in END_SECONDS
                    return
        for thread in (*feeds, *notifiers):
            thread.start()
        while not ending.wait(CHECK_SECONDS):  # idle: watches the threads
            for feed in feeds:
                feed.check()
        deadline = time.monotonic() + END_SECONDS
        for thread in (*feeds, *notifiers):
            thread.join(max(0.0, deadline - time.monotonic()))


def main() -> None:
    """Run the trackers and notifiers of the run that the first line of input describes."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # trackers may print what they like
    os.nice(5)
    with contextlib.suppress(OSError):  # if memory is short, this process has to go first
        Path("/proc/self/oom_score_adj").write_text("1000")
    run_trackers(json.loads(sys.stdin.readline()), Reports(output))
    sys.stderr.flush()
    os._exit(0)  # without threads that hang


if __name__ == "__main__":
    main()
