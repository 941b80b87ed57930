"""Samples per second with 1, 2 and 4 replicas of a role, all other roles unchanged.

`python -m benchmarks.replicas`. The whole stack on a tiny random model, local processes, one thread each. Two cases:

- rollout: engines that compute. They share the machine's cores with each other and with the trainer, so the gain is
  limited by the number of cores.
- reward: a judge with a latency of 0.25 s a sample, as over a network, and without processor time. One replica's
  capacity is its number of workers / 0.25 s, and grows in proportion to replicas.

Each number of replicas is one run, in forward and backward order; a window begins when all replicas work.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.reporting import machine, report
from benchmarks.scaling import until
from relaxd.cli.scale import ENDED as SCALED
from relaxd.cli.scale import scale_to
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.local import stack
from relaxd.local.state_folder import StateFolder
from relaxd.rewards.interface import RewardInput
from relaxd.v1.scaling_pb2 import ScaleInRequest, ScaleOutRequest
from tests.kit.models import make_tiny_model

JUDGE_SECONDS = 0.25
CONFIG = """
[run]
steps = 1000000
folder = "{folder}/runs"

[model]
path = "{folder}/tiny"

[data]
source = "addition"

[reward]
name = "{reward}"
workers = 2

[rollout]
samples_per_prompt = 4
max_new_tokens = {new_tokens}
threads = 1

[algorithm]
drop_zero_variance = false

[board]
max_staleness = 2

[trainer]
groups_per_step = 16
threads = 1

[trainer.checkpoint]
every = 0
"""


def judge(sample: RewardInput) -> float:
    """Wait as for an answer from another machine; return a reward."""
    time.sleep(JUDGE_SECONDS)
    return float(len(sample.response) % 2)


def samples_per_second(coordinator: CoordinatorClient, seconds: float) -> float:
    """Return the trained samples per second over at least `seconds`, between two committed steps."""

    def next_step(after: int) -> tuple[int, float]:
        until("a step", lambda: coordinator.run().step > after, 0.01)
        return coordinator.run().groups.trained, time.monotonic()

    first, begun = next_step(coordinator.run().step + 1)
    time.sleep(seconds)
    last, ended = next_step(coordinator.run().step)
    return (last - first) * 4 / (ended - begun)


def measure(role: str, reward: str, new_tokens: int, counts: list[int], seconds: float) -> dict[int, list[float]]:
    """Return the rates by number of replicas."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as name:
        folder = StateFolder(Path(name) / "state")
        make_tiny_model(Path(name) / "tiny")
        plan = stack.make_plan(folder, port=0, stop_with_parent=True)
        stack.up(folder, plan, print)
        try:
            with CoordinatorClient(plan.coordinator) as coordinator:
                text = CONFIG.format(folder=name, reward=reward, new_tokens=new_tokens)
                coordinator.start_run(text, "replicas")
                until("a first step", lambda: coordinator.run().step, 0.2)
                for count in [*counts, *reversed(counts)]:
                    wanted = scale_to(
                        coordinator, f"{role}={count}", ScaleOutRequest(timeout_seconds=110), ScaleInRequest()
                    )
                    watched = coordinator.watch_scaling(wanted.request_id)
                    until(f"{count} replicas", lambda w=watched: next(w).state in SCALED)
                    rates[count].append(samples_per_second(coordinator, seconds))
                    print(f"{role} x {count}: {rates[count][-1]:.1f} samples/s", flush=True)
                coordinator.stop_run("replicas", "measured")
                until("the end", lambda: coordinator.run().state in ENDED, 0.2)
        finally:
            stack.down(folder)
    return rates


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window")
    options = parser.parse_args()
    before = machine()["load_before"]
    rows: list[dict[str, object]] = []
    cases = (("rollout", "addition", 64), ("reward", "benchmarks.replicas:judge", 8))
    for role, reward, new_tokens in cases:
        rates = measure(role, reward, new_tokens, options.replicas, options.seconds)
        base = statistics.mean(rates[options.replicas[0]])
        for count, found in rates.items():
            mean = statistics.mean(found)
            windows = " · ".join(f"{rate:.1f}" for rate in found)
            rows.append({"role": role, "replicas": count, "samples/s": mean, "x": mean / base, "windows": windows})
    report("replicas", rows, load_at_the_start=before)


if __name__ == "__main__":
    main()
