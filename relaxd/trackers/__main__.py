"""The trackers' process: `python -m relaxd.trackers`, started by the coordinator.

Its first line of input is the run as JSON: run_id, folder, and the section [tracking]. The line "end" tells it that the
run has ended; the end of its input that the coordinator has. Its output are lines of JSON: tracker, and its problem.
"""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from relaxd.run_folder import CODE, CONFIG
from relaxd.trackers.feed import FOLDER, Feed
from relaxd.trackers.tracker import TrackedRun, redact

CHECK_SECONDS = 1.0
END_SECONDS = 60.0
"""Time in which trackers have to send what they have once the run, or the coordinator, has ended."""


class Reports:
    """Writes the problem of each tracker, "" without one, when it changes."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}

    def set(self, tracker: str, problem: str) -> None:
        """Set a tracker's problem, "" if it works; written unless it was the last one, too."""
        with self._lock:
            if self._problems.get(tracker) != problem:
                self._problems[tracker] = problem
                with contextlib.suppress(OSError):  # the coordinator has ended
                    print(json.dumps({"tracker": tracker, "problem": problem}), file=self._output, flush=True)


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


def run_trackers(given: dict[str, Any], reports: Reports) -> None:
    """Feed a run's trackers until the input ends, and END_SECONDS longer at most."""
    run = tracked_run(given)
    feeds = [Feed(name, run, reports.set) for name in run.settings["trackers"]]
    ending = threading.Event()

    def await_end() -> None:
        run_ended = sys.stdin.readline().strip() == "end"
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
        for feed in feeds:
            feed.start()
        while not ending.wait(CHECK_SECONDS):  # idle: watches the threads
            for feed in feeds:
                feed.check()
        deadline = time.monotonic() + END_SECONDS
        for feed in feeds:
            feed.join(max(0.0, deadline - time.monotonic()))


def main() -> None:
    """Run the trackers of the run that the first line of input describes."""
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
