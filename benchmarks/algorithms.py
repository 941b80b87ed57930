"""Reward over the steps of every algorithm, on the same task from the same seeds.

    python -m benchmarks.algorithms                            # CPU, a tiny random model that learns to count: minutes
    python -m benchmarks.algorithms --seeds 0 1 2 3 4 --lr 5e-3 2e-3 --jobs 14
    python -m benchmarks.algorithms --task addition --model FOLDER --seeds 0 1 2 --jobs 9   # one GPU: SmolLM2's sums
    python -m benchmarks.algorithms --algorithms ppo opd opd_top_16 --seeds 0 1 2 3 4 --lr 5e-3 2e-3 --add   # to others
    python -m benchmarks.algorithms --draw                     # the picture of results that were made elsewhere
    python -m benchmarks.algorithms --task demo --seeds 1      # `relaxd demo --algorithm NAME`: minutes each
    python -m benchmarks.algorithms --task demo --seeds 1 2 --folder FOLDER    # goes on where it was interrupted

counting and addition are benchmarks/delayed_training.py: the trainer's learner and losses in one process, on answers of
the version before, from an engine in the trainer's precision. Each algorithm has its own defaults, but for SETTINGS;
all are run at the same learning rates. demo runs all services on SmolLM2-135M. The algorithms get the same prompts in
the same order, but for the groups that some drop.

For sums the critic of ppo has a learning rate of its own. The teacher of opd, which gets no reward, is the same
initial model after the steps of TEACHERS.

Results of each algorithm over the seeds: the reward at the end (mean of the last fifth of the steps) and over all
steps, and the share of clipped tokens; for the demo also greedy accuracy on held-out sums, before and after.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.delayed_training import Setting, train
from benchmarks.reporting import RESULTS, report
from relaxd.algorithms import ALGORITHMS
from relaxd.config import AlgorithmConfig
from relaxd.config.algorithm import ALGORITHM
from relaxd.models.folders import resolve_model
from tests.kit.models import make_tiny_model

NEW_TOKENS = {"counting": 16, "addition": 12}
TOP_K = "opd_top_16"
"""opd that compares the teacher's 16 likeliest tokens in each place, not the sampled one alone."""
OF_TOP_K = {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, "distill_top_k": 16}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "counting": {"dr_grpo": {"constant_length": 16}, "rloo": {"correction": "tis"}, TOP_K: OF_TOP_K},
    # As in `relaxd demo`, whose task this is.
    "addition": {
        "dr_grpo": {"constant_length": 12},
        "gspo": {"clip_low": 0.03, "clip_high": 0.04},
        "rloo": {"correction": "tis"},
        TOP_K: OF_TOP_K,
    },
}
"""Settings by task that aren't the algorithm's defaults: answers are short, and a version old."""
TEACHER_ALGORITHM, TEACHER_SEED = "reinforce_plus_plus_baseline", 100
"""Algorithm and seed with which the teacher of opd learned."""
TEACHERS = {"counting": (200, 5e-3), "addition": (100, 3e-5)}
"""Steps and learning rate by task with which it learned."""
CRITIC_LR = {"addition": 1e-4}
"""The critic's learning rate by task; default: the policy's."""
SMOOTHED = 5
"""Steps of the mean that is drawn."""
Lines = list[dict[str, Any]]
"""Metrics of a run's steps; "reward", "clip_fraction"."""


def curves_file(task: str) -> Path:
    """Return the file of every seed's reward by step."""
    return RESULTS / f"algorithms-{task}-curves.json"


def configure(task: str, name: str) -> AlgorithmConfig:
    """Return an algorithm's configuration for a task."""
    found: AlgorithmConfig = ALGORITHM.validate_python({"name": name, **SETTINGS[task].get(name, {})})
    return found


def learn(
    task: str,
    name: str,
    seed: int,
    steps: int,
    lr: float,
    model: Path,
    teacher: Path | None = None,
    save: Path | None = None,
) -> Lines:
    """Train the model on a task: a tiny one to count, SmolLM2 to add on a GPU. `save` is a folder for the result."""
    counting = task == "counting"
    setting = Setting(
        model=model,
        task=task,
        steps=steps,
        groups=8,
        samples=8,
        new_tokens=NEW_TOKENS[task],
        lr=lr,
        trainer_dtype="float32" if counting else "bfloat16",
        engine_dtype="float32" if counting else "bfloat16",
        threads=1,
        critic_lr=CRITIC_LR.get(task, lr),
        teacher=teacher,
    )
    lines: Lines = train(setting, configure(task, name), 1, seed, lambda line: None, save)
    return lines


def demo(name: str, seed: int, steps: int | None, folder: Path) -> tuple[Lines, dict[str, Any]]:
    """Run the demo, unless its run is there. Return its lines and its summary."""
    run = folder / "runs" / f"{name}-{seed}"
    if not (run / "summary.json").is_file():
        words = ["demo", "--algorithm", name, "--seed", str(seed), "--run-id", run.name]
        words += ["--state", str(folder / "state")] + (["--steps", str(steps)] if steps else [])
        subprocess.run([sys.executable, "-m", "relaxd.cli", *words], check=True, cwd=folder)
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "reward": line["reward_mean"]} for line in found if "reward_mean" in line]
    return lines, json.loads((run / "summary.json").read_text())


def learn_all(
    task: str,
    model: Path,
    names: list[str],
    seeds: list[int],
    lrs: list[float],
    steps: int,
    jobs: int,
    earlier: Mapping[str, list[Lines]],
) -> dict[str, list[Lines]]:
    """Train the model with each algorithm, learning rate and seed, in `jobs` processes.

    Returns:
        The seeds' lines by "algorithm, learning rate R", beside the earlier ones.
    """
    if task == "counting":  # before the processes start: the task is too small for a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    taught = [name for name in names if name in ("opd", TOP_K)]
    with (
        tempfile.TemporaryDirectory(prefix="relaxd-teacher-") as folder,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=20) as pool,
    ):

        def begin(name: str, lr: float, teacher: Path | None = None) -> list[Future[Lines]]:
            return [pool.submit(learn, task, name, seed, steps, lr, model, teacher) for seed in seeds]

        teacher = Path(folder) / "teacher"
        teaching = learn_teacher(pool, task, model, teacher) if taught else None
        runs = {(name, lr): begin(name, lr) for lr in lrs for name in names if name not in taught}
        if teaching is not None:
            last = row("", [teaching.result()])["end reward"]
            print(f"opd's teacher: reward {last:.3f} in its last fifth", flush=True)
            runs |= {(name, lr): begin(name, lr, teacher) for lr in lrs for name in taught}
        curves = dict(earlier)
        for lr, name in itertools.product(lrs, names):
            curves[f"{name}, learning rate {lr:g}"] = [_short(one.result()) for one in runs[name, lr]]
            curves_file(task).write_text(json.dumps(curves) + "\n")
            print(f"{name}, learning rate {lr:g}: done", flush=True)
    return curves


def learn_teacher(pool: ProcessPoolExecutor, task: str, model: Path, folder: Path) -> Future[Lines]:
    """Begin to train opd's teacher, which is written to a folder."""
    steps, lr = TEACHERS[task]
    return pool.submit(learn, task, TEACHER_ALGORITHM, TEACHER_SEED, steps, lr, model, None, folder)


def row(name: str, runs: list[Lines]) -> dict[str, Any]:
    """Return one algorithm's row of the table."""
    ends = [statistics.mean(line["reward"] for line in lines[-max(len(lines) // 5, 1) :]) for lines in runs]
    every = [line for lines in runs for line in lines]
    return {
        "algorithm": name,
        "steps": len(runs[0]),
        "end reward": statistics.mean(ends),
        "least": min(ends),
        "most": max(ends),
        "mean reward": statistics.mean(line["reward"] for line in every),
        "clipped": statistics.mean(line.get("clip_fraction", 0.0) for line in every),
    }


def draw(curves: Mapping[str, list[Lines]], title: str, path: Path) -> None:
    """Plot the reward by step, a running mean: thin lines are seeds, thick lines their means.

    Curves whose names end alike, after a comma, share a panel.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[Lines]]] = {}
    for name, runs in curves.items():
        label, _, panel = name.partition(", ")
        panels.setdefault(panel, {})[label] = runs
    figure = Figure(figsize=(9, 1 + 4 * len(panels)), dpi=150, layout="constrained")
    for axes, (panel, labelled) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for index, (label, runs) in enumerate(labelled.items()):
            color, dashes = colormaps["tab10"](index % 10), "--" if index >= 10 else "-"
            smooth = [_running_mean([line["reward"] for line in lines]) for lines in runs]
            for one in smooth if len(smooth) > 1 else []:
                axes.plot(range(1, len(one) + 1), one, color=color, linewidth=0.5, alpha=0.4)
            means = [statistics.mean(at) for at in zip(*smooth, strict=False)]
            axes.plot(range(1, len(means) + 1), means, color=color, linewidth=2, linestyle=dashes, label=label)
        axes.set_title(f"{title}, {panel}" if panel else title, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel(f"reward, mean of {SMOOTHED} steps")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


def _short(lines: Lines) -> Lines:
    """Return the metrics that are reported, with four digits."""
    return [{key: round(line[key], 4) for key in ("reward", "clip_fraction") if key in line} for line in lines]


def _running_mean(values: list[float]) -> list[float]:
    return [statistics.mean(values[max(0, end - SMOOTHED) : end]) for end in range(1, len(values) + 1)]


def draw_task(task: str, curves: Mapping[str, list[Lines]]) -> None:
    """Draw the picture of a task that one process runs."""
    seeds = max(map(len, curves.values()))
    draw(curves, f"{task}, {seeds} seeds" if seeds > 1 else task, RESULTS / f"algorithms-{task}.png")


def main() -> None:
    """Run every algorithm with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("counting", "addition", "demo"), default="counting")
    parser.add_argument("--model", help="folder or name of a language model, for addition")
    parser.add_argument("--algorithms", nargs="+", choices=(*ALGORITHMS, TOP_K), help="default: all that can run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: 100 for counting, 60 for addition, the demo's own")
    parser.add_argument(
        "--lr", nargs="+", type=float, help="learning rates; default: 5e-3 for counting, 3e-5 for addition"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, but for the demo")
    parser.add_argument("--folder", type=Path, help="the demo's runs, which are kept there; default: nowhere")
    parser.add_argument("--add", action="store_true", help="keep the task's last results of other algorithms")
    parser.add_argument("--draw", action="store_true", help="only draw the task's last results again")
    options = parser.parse_args()
    seeds: list[int] = options.seeds
    task: str = options.task
    if task == "addition" and options.model is None and not options.draw:
        parser.error("--task addition needs --model")
    alone = task != "demo"
    names: list[str] = options.algorithms or [*ALGORITHMS, *([TOP_K] if alone else [])]
    if options.draw:
        draw_task(task, json.loads(curves_file(task).read_text()))
        return
    if alone:
        counting = task == "counting"
        lrs: list[float] = options.lr or [5e-3 if counting else 3e-5]
        with tempfile.TemporaryDirectory(prefix="relaxd-algorithms-") as place:
            model = (
                make_tiny_model(Path(place) / "model", architecture="qwen3")
                if counting
                else resolve_model(options.model)
            )
            steps = options.steps or (100 if counting else 60)
            earlier = json.loads(curves_file(task).read_text()) if options.add else {}
            curves = learn_all(task, model, names, seeds, lrs, steps, options.jobs, earlier)
        report(f"algorithms-{task}", [row(name, runs) for name, runs in curves.items()], seeds=seeds, lr=lrs)
        draw_task(task, curves)
        return
    curves, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="relaxd-algorithms-") as place:
        folder = options.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            pairs = [demo(name, seed, options.steps, folder.absolute()) for seed in seeds]
            curves[name], summaries = [lines for lines, _ in pairs], [summary for _, summary in pairs]
            found = {
                key: statistics.mean(summary[key] for summary in summaries)
                for key in ("accuracy_before", "accuracy_after", "published", "dropped", "wall_seconds")
            }
            rows.append(row(name, curves[name]) | found)
            print(name, {key: round(value, 3) for key, value in rows[-1].items() if value != name}, flush=True)
    counted = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    draw(curves, f"relaxd demo --algorithm NAME, {counted}", RESULTS / "algorithms-demo.png")
    report("algorithms-demo", rows, seeds=seeds)


if __name__ == "__main__":
    main()
