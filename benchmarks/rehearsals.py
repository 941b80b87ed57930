"""Rehearsals of the shapes that this project has to carry, one after another.

`python -m benchmarks.rehearsals` or `python -m benchmarks.rehearsals math moe`. Each shape of benchmarks/shapes is
rehearsed as `relaxd rehearse` does, with the replicas and scales below, and writes rehearsal-NAME.json to
benchmarks/results: the report's rows, all limits with the times that more would fit, and p99 of the replicas' calls.
Goals: the coordinator uses at most one processor, and p99 of Heartbeat at rest is at most 100 ms.
"""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.reporting import machine, report
from relaxd.config.load_toml import load_file
from relaxd.tools.rehearsal import capacity
from relaxd.tools.rehearsal.assumptions import Scale
from relaxd.tools.rehearsal.capacity import refusal
from relaxd.tools.rehearsal.rehearsal_report import Measured, limits, rows
from relaxd.tools.rehearsal.rehearse import rehearse

SHAPES = Path(__file__).parent / "shapes"
SCALES = {
    "math": (Scale(rollout=64, time=8.0, payload=4), 70.0),
    "long-thinking": (Scale(rollout=256, time=6.0, payload=1), 60.0),
    "agents": (Scale(rollout=128, time=30.0, payload=1), 60.0),
    "moe": (Scale(rollout=64, time=10.0, payload=16), 60.0),
    "very-long": (Scale(rollout=512, time=60.0, payload=1), 90.0),
}
"""By shape: how it is scaled, and the length of the window in seconds."""


def write(name: str, found: Measured, load_before: float) -> None:
    """Report a rehearsal and write its file."""
    times, cores = found.call_times, found.cpu("coordinator")
    beats = times.heartbeat_at_rest
    judged: dict[str, Any] = {
        "coordinator_of_goal": round(cores / capacity.CORES, 4),
        "heartbeat_p99_of_goal": None if beats is None else round(beats / capacity.HEARTBEAT_SECONDS, 4),
    }
    report(
        f"rehearsal-{name}",
        [{"row": row, "value": value} for row, value in rows(found)],
        goal="coordinator <= 1 core and p99 of Heartbeat at rest <= 100 ms",
        met=cores <= capacity.CORES and beats is not None and beats <= capacity.HEARTBEAT_SECONDS,
        **judged,
        scale=asdict(found.scale),
        steps=found.steps,
        seconds=round(found.wall_seconds, 1),
        refused=refusal(found.load),
        machine_busy=round(found.machine_share, 3),
        machine_busy_with_the_rehearsal=round(found.own_share, 3),
        call_seconds=asdict(times),
        limits=[{**asdict(one), "factor": one.factor} for one in limits(found)],
        load_at_start=load_before,
    )


def main() -> None:
    """Rehearse and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"{', '.join(SCALES)}; without any: all")
    parser.add_argument("--time-scale", type=float, help="another time scale for all of them")
    parser.add_argument("--seconds", type=float, help="another length of the window for all of them")
    options = parser.parse_args()
    for name in options.shapes or SCALES:
        scale, seconds = SCALES[name]
        scale, seconds = replace(scale, time=options.time_scale or scale.time), options.seconds or seconds
        before = machine()["load_before"]
        print(f"{time.strftime('%H:%M:%S')} {name}: {scale}", flush=True)
        config, logs = load_file(SHAPES / f"{name}.toml"), Path(f"rehearsal-{name}-logs")
        found = rehearse(config, scale, seconds, lambda text: print(text, flush=True), logs)
        write(name, found, before)


if __name__ == "__main__":
    main()
