"""Recovery time of a run after all processes were killed: from `relaxd resume` to the first new step.

    python -m benchmarks.resume examples/addition.toml                                  # CPU: the demo's run
    python -m benchmarks.resume examples/addition-gpu.toml --model FOLDER               # GPUs

`relaxd run` until some steps after a checkpoint are committed; SIGKILL to all processes at once; `relaxd resume`, which
starts Redis on its data and the services, loads the checkpoint, replays the later steps from their files, sends the
weights to the engines, and continues training. Then everything is killed again, and so on. Columns:

at step             the last step before the kill; `--replayed` of them, or a few more, are after the last checkpoint
resumed s           from the command to the first new committed step
of that, step s     seconds per step: median of those before the kill
load to step s      the part of resumed s after loading the checkpoint: replayed steps, weights to engines, the new step

Further arguments are the run's settings, such as --trainer.groups_per_step 2.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reporting import machine, report
from relaxd.local.state_folder import StateFolder

STEP = re.compile(r"step +(\d+)/")
LIMIT_SECONDS = 900.0


def kill_everything(process: "subprocess.Popen[str]", state: StateFolder) -> None:
    """Kill a command, its services and their children at once."""
    running = state.read()
    assert running is not None
    supervisor = psutil.Process(running.pid)
    victims = [psutil.Process(process.pid), supervisor, *supervisor.children(recursive=True)]
    for victim in victims:
        victim.suspend()
    for victim in victims:
        victim.kill()
    psutil.wait_procs(victims[1:], timeout=30)
    process.wait(timeout=30)


class Life:
    """The run's processes from one command until they are killed."""

    def __init__(self, words: list[str], place: Path, state: StateFolder) -> None:
        self._state = state
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "relaxd.cli", *words, "--state", str(state.path)],
            cwd=place,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until_step(self, step: int) -> tuple[int, float]:
        """Wait until at least this step is committed; return the step and the seconds since the command started."""
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if (found := STEP.match(line)) and int(found[1]) >= step:
                return int(found[1]), time.monotonic() - self.began
            if time.monotonic() - self.began > LIMIT_SECONDS:
                break
        raise SystemExit("the run did not get there:\n" + "".join(said[-40:]))

    def end(self) -> None:
        """Kill everything."""
        kill_everything(self.process, self._state)


def seconds_between(text: str, begin: str, end: str) -> float:
    """Return the seconds between a log's last lines with each of two words, NaN without them."""
    stamps = []
    for word in (begin, end):
        lines = [line for line in text.splitlines() if word in line]
        if not lines:
            return float("nan")
        moment = lines[-1].split(" ", 1)[0]
        stamps.append(time.mktime(time.strptime(moment[:19], "%Y-%m-%dT%H:%M:%S")) + float(moment[19:23]))
    return stamps[1] - stamps[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a run's TOML file")
    parser.add_argument("--model", help="folder or name of the model, instead of the file's")
    parser.add_argument("--times", type=int, default=3, help="how often everything is killed")
    parser.add_argument("--every", type=int, default=4, help="trainer.checkpoint.every")
    parser.add_argument("--replayed", type=int, default=2, help="steps after the checkpoint that have to be repeated")
    options, settings = parser.parse_known_args()
    load = machine()["load_before"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relaxd-bench-") as name:
        place = Path(name)
        state, folder = StateFolder(place / "state"), place / "runs" / "resume"
        words = ["run", str(options.config.resolve()), "--run-id", "resume", "--run.folder", str(place / "runs")]
        words += ["--run.steps", "100000", "--eval.prompts", "0", "--trainer.checkpoint.every", str(options.every)]
        words += [*(["--model.path", options.model] if options.model else []), *settings]
        life = Life(words, place, state)
        try:
            last, _ = life.until_step(options.every + options.replayed)
            for number in range(options.times):
                life.end()
                killed = last
                before = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                steps = [line["step_seconds"] for line in before if line.get("step_seconds")]
                life = Life(["resume", "resume", "--folder", str(folder)], place, state)
                first, resumed = life.until_step(last + 1)
                last, _ = life.until_step(first + options.every + options.replayed - 1)
                trainer = state.log("trainer").read_text(errors="replace")
                rows.append(
                    {
                        "kill": number + 1,
                        "at step": killed,
                        "first new step": first,
                        "resumed s": resumed,
                        "of that, step s": statistics.median(steps),
                        "load to step s": seconds_between(trainer, "is loaded", f"step {first}: reward"),
                    }
                )
                print(rows[-1], flush=True)
        finally:
            life.end()
    report("resume", rows, config=options.config.name, load_at_the_start=load)


if __name__ == "__main__":
    main()
