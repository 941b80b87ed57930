"""The effect of TIS and IcePop when the trained tokens come from old weights and another precision.

    python -m benchmarks.mismatch                              # CPU, a tiny random model that learns to count: 5 min
    python -m benchmarks.mismatch --steps 6 --seeds 0          # the same as a smoke test
    python -m benchmarks.mismatch --task addition --model FOLDER --gpu   # one GPU: SmolLM2-135M-Instruct and sums

Each setting trains the same model from the same seeds with the trainer's learner, losses and corrections, on
answers of an engine in bf16 that are `--delay` versions old (benchmarks/delayed_training.py):

on-policy   no delay: the reference for task and learning rate
none        policy gradient with no correction at all (old_logprobs = "current")
clip        PPO's ratio to the engine, clipped (old_logprobs = "rollout": relaxd's default)
tis, icepop old_logprobs = "current" and that correction, with its default limits
tis, opsm   as tis, and bad answers that the policy has moved away from are left out (opsm_delta = 0.05)

Results of each setting over the seeds: the reward of the current weights at the end (mean of the last tenth of the
steps) and over all steps, how many seeds ended below half of their on-policy reward; as means over the updates, the
divergence between engine and trainer and the effective sample size (a share); as a mean over the steps, the share of
tokens that was clipped, truncated or left out.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.delayed_training import Setting, train
from benchmarks.reporting import RESULTS, report
from relaxd.config.algorithm import ALGORITHM
from relaxd.models.folders import resolve_model
from tests.kit.models import make_tiny_model

METHODS: dict[str, dict[str, Any]] = {
    "on-policy": {"old_logprobs": "current"},
    "none": {"old_logprobs": "current"},
    "clip": {"old_logprobs": "rollout"},
    "tis": {"old_logprobs": "current", "correction": "tis"},
    "icepop": {"old_logprobs": "current", "correction": "icepop"},
    "tis, opsm": {"old_logprobs": "current", "correction": "tis", "opsm_delta": 0.05},
}
COLORS = {
    "on-policy": "#9ca3af",
    "none": "#dc2626",
    "clip": "#f59e0b",
    "tis": "#2563eb",
    "icepop": "#16a34a",
    "tis, opsm": "#7c3aed",
}
Curves = dict[str, list[list[dict[str, float]]]]
"""Values by method, seed and step."""


def end_reward(lines: Sequence[dict[str, float]]) -> float:
    """Return the mean reward of the last tenth of the steps."""
    return statistics.mean(line["reward"] for line in lines[-max(len(lines) // 10, 1) :])


def row(method: str, curves: Curves) -> dict[str, Any]:
    """Return one method's row of the table."""
    runs = curves[method]
    ends = [end_reward(lines) for lines in runs]
    best = [end_reward(lines) for lines in curves["on-policy"]] if "on-policy" in curves else []
    every = [line for lines in runs for line in lines]

    def mean(name: str) -> float:
        return statistics.mean(line.get(name, 0.0) for line in every)

    def of_updates(name: str) -> float:  # a step whose groups all have equal rewards makes none
        return statistics.mean([line[name] for line in every if name in line] or [float("nan")])

    return {
        "method": method,
        "end reward": statistics.mean(ends),
        "least": min(ends),
        "most": max(ends),
        "mean reward": mean("reward"),
        "collapsed": f"{sum(end < 0.5 * top for end, top in zip(ends, best, strict=True))}/{len(ends)}" if best else "",
        "drift": of_updates("policy_drift"),
        "drift p99": of_updates("policy_drift_p99"),
        "KL": of_updates("policy_drift_kl"),
        "effective": of_updates("policy_drift_ess"),
        "limited": mean("correction_fraction") + mean("clip_fraction") + mean("opsm_fraction"),
        "groups": mean("groups"),
        "gradient norm": mean("grad_norm"),
    }


def draw(curves: Curves, title: str, path: Path) -> None:
    """Plot reward and divergence by step: thin lines are seeds, thick lines their means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    panels = {"reward": "reward of the current weights", "policy_drift_kl": "KL(engine, trainer) of the trained tokens"}
    for axes, (name, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for method, runs in curves.items():
            values = [[line.get(name, float("nan")) for line in lines] for lines in runs]
            steps = range(1, len(values[0]) + 1)
            for one in values:
                axes.plot(steps, one, color=COLORS[method], linewidth=0.6, alpha=0.35)
            means = [statistics.mean(at) for at in zip(*values, strict=True)]
            axes.plot(steps, means, color=COLORS[method], linewidth=2, label=method)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if name != "reward":
            axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("counting", "addition"), default="counting")
    parser.add_argument("--model", help="folder or name of a language model, for addition")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--delay", type=int, default=8, help="versions between the engine's weights and the trainer's")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--lr", type=float, help="default: 1e-2 for counting, 1e-5 for addition")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="train in bf16, too")
    options = parser.parse_args()
    if options.task == "addition" and options.model is None:
        parser.error("--task addition needs --model")
    curves: Curves = {}
    with tempfile.TemporaryDirectory() as place:
        counting = options.task == "counting"
        setting = Setting(
            model=make_tiny_model(Path(place), architecture="qwen3") if counting else resolve_model(options.model),
            task=options.task,
            steps=options.steps,
            groups=options.groups,
            samples=options.samples,
            new_tokens=16 if counting else 12,
            lr=options.lr or (1e-2 if counting else 1e-5),
            trainer_dtype="bfloat16" if options.gpu else "float32",
            engine_dtype="bfloat16",
            threads=options.threads,
        )
        for seed in options.seeds:
            for method in options.methods:
                delay = 0 if method == "on-policy" else options.delay
                algorithm = ALGORITHM.validate_python(METHODS[method])

                def record(line: dict[str, float], method: str = method, seed: int = seed) -> None:
                    if line["step"] % max(options.steps // 5, 1) == 0:
                        print(f"{method}, seed {seed}, step {line['step']}: reward {line['reward']:.3f}", flush=True)

                curves.setdefault(method, []).append(train(setting, algorithm, delay, seed, record))
    name = f"mismatch-{options.task}-{options.delay}"
    title = f"{options.task}, answers {options.delay} versions old, engine in bf16, learning rate {setting.lr:g}"
    draw(curves, title, RESULTS / f"{name}.png")
    kept = (
        "reward",
        "policy_drift",
        "policy_drift_kl",
        "policy_drift_ess",
        "correction_fraction",
        "clip_fraction",
        "groups",
    )
    every = {
        method: [{key: [round(line.get(key, 0.0), 6) for line in lines] for key in kept} for lines in runs]
        for method, runs in curves.items()
    }
    same = [line for lines in curves.get("on-policy", []) for line in lines if "logprob_difference" in line]
    facts = {
        f"on_policy_{key}": statistics.mean(line[key] for line in same)
        for key in ("logprob_difference", "logprob_difference_p99", "logprob_difference_max", "logprob_difference_kl")
        if same
    }
    settings = {key: str(value) for key, value in vars(setting).items() if key != "model"}
    rows = [row(method, curves) for method in curves]
    report(name, rows, **facts, delay=options.delay, seeds=options.seeds, **settings)
    (RESULTS / f"{name}-curves.json").write_text(json.dumps(every) + "\n")


if __name__ == "__main__":
    main()
