"""Cost of a run's record: the coordinator's processor time and memory with everything on, beside everything off.

`python -m benchmarks.record_cost`. Rehearsals (`relaxd rehearse`: a real coordinator, Redis and board; scripted engines
and trainer) take turns. On: all samples are kept, TensorBoard gets them and the numbers, four rules are watched, an
address gets a report of every step, and a client watches the run. Goals: 1 % of a core in steps of 10 s, and 20 MB
more memory of the coordinator; its child, which has the tracker and Apprise, is stated beside.
"""

import argparse
import statistics
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.reporting import report
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.roles import COORDINATOR
from relaxd.tools.rehearsal.assumptions import Scale
from relaxd.tools.rehearsal.counters import Counters
from relaxd.tools.rehearsal.rehearse import RUN_ID, rehearsed_run
from tests.kit.webhook import webhook

CONFIG = """
[run]
steps = 1000000

[model]
path = "model"

[data]
source = "addition"
max_prompt_tokens = 128

[reward]
name = "math"

[rollout]
engine = "sglang"
samples_per_prompt = 8
max_new_tokens = 1024

[trainer]
groups_per_step = 16
micro_batch_tokens = 65536

[rehearsal]
median_tokens = 256
tokens_per_second = 1000000
sample_tokens_per_second = 10000
train_tokens_per_second = 10000000
update_seconds = 1.0
sync_seconds = 0.0
"""
OFF = {"telemetry": {"samples_per_step": 0}, "alerts": {"rules": []}}
RULES = ["reward_mean < 0.5 x highest over 20 steps", "kl > 0.2", "entropy < 0.05 over 10 steps", "loss > 100"]
WARM_STEPS = 5
"""Steps before the first look: imports, and caches that fill."""
GOAL_STEP_SECONDS = 10.0
STALLED_SECONDS = 120.0


@dataclass
class Use:
    """Processor seconds and resident bytes of the coordinator and its children, at a step."""

    step: int
    coordinator_seconds: float
    coordinator_bytes: int
    child_seconds: float
    child_bytes: int


def use(counters: Counters) -> Use:
    """Read the use of the coordinator and its child now."""
    state = counters.folder.read()
    assert state is not None
    (pid,) = [service.pid for service in state.services if service.role == COORDINATOR and service.pid]
    own = psutil.Process(pid)
    children = own.children(recursive=True)
    return Use(
        counters.coordinator.run(RUN_ID).step,
        sum(own.cpu_times()[:2]),
        own.memory_info().rss,
        sum(sum(child.cpu_times()[:2]) for child in children),
        sum(child.memory_info().rss for child in children),
    )


def until_step(counters: Counters, step: int) -> Use:
    """Wait until a step has ended. Raises CliError if no step ends for long."""
    moved, last = time.monotonic(), -1
    while (now := counters.sample().step) < step:
        if now > last:
            moved, last = time.monotonic(), now
        elif time.monotonic() - moved > STALLED_SECONDS:
            raise CliError(f"no step for {STALLED_SECONDS:.0f} s: {counters.run.waiting_for or counters.run.state}")
        time.sleep(0.25)
    return use(counters)


def watch(counters: Counters) -> None:
    """Watch the run as `relaxd watch` does, until its coordinator goes."""
    try:
        for _ in counters.coordinator.watch(RUN_ID, away_seconds=0.0):
            pass
    except (CliError, ValueError):  # the rehearsal has ended, and closed its channel
        return


def measure(steps: int, *, on: bool) -> dict[str, Any]:
    """Rehearse a run and return its costs for each step after the first ones."""
    settings: dict[str, Any] = tomllib.loads(CONFIG)
    with webhook() as server, TemporaryDirectory() as name:
        urls = Path(name) / "urls"
        urls.write_text(f"{server.url}?freq=1")
        settings |= OFF
        if on:
            settings |= {
                "telemetry": {"all_samples": True},
                "tracking": {"trackers": ["tensorboard"]},
                "alerts": {"rules": RULES, "urls_file": str(urls)},
            }
        config = RunConfig.model_validate(settings)
        with rehearsed_run(config, Scale(rollout=1, time=1.0, payload=1), print, Path("record-cost-logs")) as counters:
            if on:
                threading.Thread(target=watch, args=(counters,), daemon=True).start()
            first = until_step(counters, WARM_STEPS)
            began = time.monotonic()
            end = until_step(counters, first.step + steps)
            seconds, done = time.monotonic() - began, end.step - first.step
        assert bool(server.posted) == on
    return {
        "everything": "on" if on else "off",
        "s a step": seconds / done,
        "coordinator ms a step": (end.coordinator_seconds - first.coordinator_seconds) / done * 1e3,
        "child ms a step": (end.child_seconds - first.child_seconds) / done * 1e3,
        "coordinator MB": end.coordinator_bytes / 1e6,
        "child MB": end.child_bytes / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = [measure(options.steps, on=on) for _ in range(options.rounds) for on in (False, True)]

    def more(name: str) -> float:
        on, off = (statistics.median(row[name] for row in rows if row["everything"] == of) for of in ("on", "off"))
        return float(on - off)

    milliseconds, megabytes = more("coordinator ms a step") + more("child ms a step"), more("coordinator MB")
    share = milliseconds / 1e3 / GOAL_STEP_SECONDS
    report(
        "record_cost",
        rows,
        more_ms_a_step=round(milliseconds, 1),
        share_of_a_10_s_step=round(share, 4),
        coordinator_mb_more=round(megabytes, 1),
        met=share <= 0.01 and megabytes <= 20,
    )


if __name__ == "__main__":
    main()
