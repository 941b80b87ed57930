"""The autoscaler beside the best fixed number of engines, in a fluid model of a run, under three loads.

    python -m benchmarks.autoscaler

A run is worth the groups that it trains for each GPU second: an engine is one GPU, the trainer eight. The model has 60
groups a step, engines that make 0.1 groups/s each (5 % noise) and come after a minute, training of 60 s a step
(10 engines keep it busy) and 8 hours. The autoscaler begins with 2 engines. Goal: at most 10 % less than the best fixed
number, which nobody knows beforehand.
"""

import math
from collections.abc import Callable

from benchmarks.reporting import report
from tests.kit.fluid_run import FluidResult, FluidRun, Load

SECONDS = 8 * 3600
TRAINER_GPUS = 8
MOST = 32
LOADS: dict[str, Callable[[float], Load]] = {
    "the same for 8 hours": lambda second: Load(),
    "answers twice as long after 4 hours": lambda second: Load(0.1 if second < SECONDS / 2 else 0.05),
    "answers that grow by half and shrink, in 4 hours": lambda second: Load(
        0.1 / (1.25 - 0.25 * math.cos(4 * math.pi * second / SECONDS))
    ),
}


def worth(result: FluidResult) -> float:
    """Return the groups trained in a GPU hour."""
    return 3600 * result.trained / (result.engine_seconds + TRAINER_GPUS * SECONDS)


def main() -> None:
    """Print a row for each load."""
    rows = []
    for name, load in LOADS.items():
        fixed = {count: worth(FluidRun(count, load, fixed=True).run(SECONDS)) for count in range(2, MOST + 1)}
        best = max(fixed, key=lambda count: fixed[count])
        scaled = FluidRun(2, load).run(SECONDS)
        rows.append(
            {
                "load": name,
                "best_fixed": best,
                "groups_per_gpu_hour_fixed": fixed[best],
                "groups_per_gpu_hour_autoscaled": worth(scaled),
                "regret": 1 - worth(scaled) / fixed[best],
                "decisions": len(scaled.decisions),
            }
        )
    report("autoscaler", rows)


if __name__ == "__main__":
    main()
