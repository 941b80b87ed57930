"""Speed of training with and without evaluations beside it: `python -m benchmarks.evaluation`.

The whole stack on a tiny random model, local processes, one thread each. Runs with the same seed and steps take turns:
one without evaluations, and one for each eval.engine_share with an evaluation every few steps. What is measured is the
trained samples per second from the sixth step on. The last column is the least that the same engines could lose: an
evaluation's answers are as long as those of training and take their share of what is generated.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.reporting import machine, report
from benchmarks.scaling import until
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.local import stack
from relaxd.local.state_folder import StateFolder
from tests.kit.models import make_tiny_model

FIRST = 6
"""The first step that is measured."""
GROUPS, SAMPLES, NEW_TOKENS = 4, 4, 32
RUN_SECONDS = 600.0
"""Longest time for a run."""
CONFIG = """
[run]
steps = {steps}
folder = "{folder}/runs"
seed = 1

[model]
path = "{folder}/tiny"

[data]
source = "addition"

[reward]
name = "addition"
workers = 1

[rollout]
samples_per_prompt = {samples}
max_new_tokens = {new_tokens}
min_new_tokens = {new_tokens}
max_running_samples = 64
threads = 1

[algorithm]
drop_zero_variance = false

[board]
max_staleness = 1

[trainer]
groups_per_step = {groups}
threads = 1

[trainer.checkpoint]
every = 0

[eval]
prompts = {prompts}
interval = {interval}
engine_share = {share}
before = false
after = false
"""


def measure(
    coordinator: CoordinatorClient, folder: Path, run_id: str, share: float, options: argparse.Namespace
) -> tuple[float, int]:
    """Return the trained samples per second of a run, and the evaluations during it. A share of 0: none."""
    text = CONFIG.format(
        folder=folder,
        steps=options.steps,
        samples=SAMPLES,
        new_tokens=NEW_TOKENS,
        groups=GROUPS,
        prompts=options.prompts if share else 0,
        interval=options.interval if share else 0,
        share=share or 1,
    )
    coordinator.start_run(text, run_id)
    until("the end", lambda: coordinator.run().state in ENDED, 0.2, RUN_SECONDS)
    lines = [json.loads(line) for line in (folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["step_seconds"] for line in lines if "step_seconds" in line}
    assert len(steps) == options.steps, f"{len(steps)} steps instead of {options.steps}"
    seconds = [taken for step, taken in steps.items() if step >= FIRST]
    evaluations = sum("eval_reward" in line for line in lines)
    return len(seconds) * GROUPS * SAMPLES / sum(seconds), evaluations


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.25], help="of eval.engine_share")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    before = machine()["load_before"]
    found: dict[float, list[tuple[float, int]]] = {share: [] for share in (0.0, *options.shares)}
    with tempfile.TemporaryDirectory() as name:
        folder = StateFolder(Path(name) / "state")
        make_tiny_model(Path(name) / "tiny")
        plan = stack.make_plan(folder, port=0, stop_with_parent=True)
        stack.up(folder, plan, print)
        try:
            with CoordinatorClient(plan.coordinator) as coordinator:
                for number in range(options.rounds):
                    for share, runs in found.items():
                        run_id = f"evaluation-{number}-{share}"
                        runs.append(measure(coordinator, Path(name), run_id, share, options))
                        print(
                            f"engine_share {share}: {runs[-1][0]:.1f} samples/s, {runs[-1][1]} evaluations", flush=True
                        )
        finally:
            stack.down(folder)
    medians = {share: statistics.median(rate for rate, _ in runs) for share, runs in found.items()}
    training = options.interval * GROUPS * SAMPLES
    least = training / (training + options.prompts)
    rows = [
        {
            "evaluations": f"every {options.interval} steps, engine_share {share}" if share else "none",
            "samples/s": medians[share],
            "x none": medians[share] / medians[0.0],
            "rounds": " · ".join(f"{rate:.1f}" for rate, _ in runs),
            "evaluations in a run": runs[0][1],
            "training's share of the answers": least if share else 1.0,
        }
        for share, runs in found.items()
    ]
    report("evaluation", rows, load_at_the_start=before, steps=options.steps, prompts=options.prompts)


if __name__ == "__main__":
    main()
