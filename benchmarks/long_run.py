"""Memory and time of a run of many steps: does anything grow with their number?

`python -m benchmarks.long_run --steps 20000`. A rehearsal (`relaxd rehearse`) of a run with tiny steps: the
coordinator, Redis, the board, a rollout replica, reward, advantage and the trainer's intake are real; the engine and
the learner take no time. Goal: at the end, Redis's memory and keys, the services' memory and the time of a step are
what they were after the first tenth.
"""

import argparse
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reporting import report
from relaxd.config import RunConfig
from relaxd.tools.rehearsal.assumptions import Scale
from relaxd.tools.rehearsal.counters import MACHINE, Counters, Sample
from relaxd.tools.rehearsal.rehearse import rehearsed_run

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
samples_per_prompt = 2
max_new_tokens = 64

[trainer]
groups_per_step = 2
micro_batch_tokens = 4096

[rehearsal]
median_tokens = 8
spread = 0.1
tokens_per_second = 100000
sample_tokens_per_second = 10000
train_tokens_per_second = 10000000
update_seconds = 0.0
sync_seconds = 0.0
"""
FLAT = ("Redis MB", "keys", "ms a step", "coordinator MB", "coordinator ms", "trainer MB", "trainer ms")
"""What must not grow."""
STALLED_SECONDS = 120.0
"""Without a step for so long, the benchmark gives up."""


def row(counters: Counters, before: Sample, now: Sample) -> dict[str, Any]:
    """Describe the run at a moment, and the steps since the one before."""
    steps = max(1, now.step - before.step)
    info: Any = counters.redis.info()
    files = sum(path.stat().st_size for path in counters.run_folder.rglob("*") if path.is_file())
    shown: dict[str, Any] = {
        "step": now.step,
        "ms a step": (now.time - before.time) / steps * 1e3,
        "commands a step": (now.operations - before.operations) / steps,
        "Redis MB": info["used_memory"] / 1e6,
        "keys": counters.redis.dbsize(),
        "run folder MB": files / 1e6,
    }
    for role in ("coordinator", "trainer", "rollout", "reward", "advantage"):
        cpu = (now.cpu[role] - before.cpu[role]) / steps * 1e3
        shown[f"{role} MB"] = resident(counters, role) / 1e6
        shown[f"{role} ms"] = cpu
    shown["machine's ms"] = (now.cpu[MACHINE] - before.cpu[MACHINE]) / steps * 1e3
    return shown


def resident(counters: Counters, role: str) -> int:
    """Return the resident bytes of a role's processes."""
    state = counters.folder.read()
    assert state is not None
    pids = [service.pid for service in state.services if service.role == role and service.pid]
    services = [psutil.Process(pid) for pid in pids]
    return sum(one.memory_info().rss for service in services for one in (service, *service.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=20, help="lines of the table")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time, wherever the run is")
    options = parser.parse_args()
    config = RunConfig.model_validate(tomllib.loads(CONFIG))
    each = max(1, options.steps // options.rows)
    rows: list[dict[str, Any]] = []

    def say(line: str) -> None:
        print(line, flush=True)

    with rehearsed_run(config, Scale(rollout=1, time=1.0, payload=1), say, Path("long-run-logs")) as counters:
        begun = moved = time.monotonic()
        before = now = counters.sample()
        while now.step < options.steps and time.monotonic() - begun < options.seconds:
            time.sleep(0.5)
            last, now = now, counters.sample()
            if now.step > last.step:
                moved = now.time
            elif now.time - moved > STALLED_SECONDS:
                sys.exit(f"no step for {STALLED_SECONDS:.0f} s: {counters.run.waiting_for or counters.run.state}")
            if now.step >= before.step + each:
                rows.append(row(counters, before, now))
                say(", ".join(f"{name} {value:.5g}" for name, value in rows[-1].items()))
                before = now
    if not rows:
        sys.exit(f"not {each} steps in {options.seconds:.0f} s: give more --seconds, or --rows")
    first, end = rows[len(rows) // 10], rows[-1]
    growth = {name: round(end[name] / first[name], 2) for name in FLAT}
    report("long_run", rows, growth=growth, met=all(value <= 1.1 for value in growth.values()))


if __name__ == "__main__":
    main()
