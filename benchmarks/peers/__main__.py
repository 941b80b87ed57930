"""Whole runs of relaxd, verl and TRL on one GPU, each with one command, and the table of what they took.

    python -m benchmarks.peers relaxd --steps 13 --out relaxd.json
    python -m benchmarks.peers verl --steps 13 --out verl.json
    python -m benchmarks.peers trl --steps 13 --out trl.json --extra generation=continuous
    python -m benchmarks.peers relaxd --gpus 2 --out relaxd-async.json    asynchronous; verl, too
    python -m benchmarks.peers table relaxd.json verl.json trl.json
    python -m benchmarks.peers curves OUT.png relaxd-0.json relaxd-1.json trl-0.json ...

All have the same model (a Qwen3 with random weights whose answers have geometric lengths), prompts, samples a step,
rewards at random, and a learning rate that changes nothing. Each system writes a line after a step; its times are
measured here, from outside, alike for all. --cpu tries relaxd and TRL on a tiny model. --task sums --model FOLDER
--longest 12 teaches SmolLM2 the demo's sums instead, and `curves` plots reward by wall time, a line per run.
"""

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.peers import relaxd_run, trl_run, verl_run
from benchmarks.peers.watch import watch
from benchmarks.peers.workload import Workload, add_options, from_options
from benchmarks.reporting import machine, report

PACKAGES = ("torch", "transformers", "sglang", "verl", "trl", "ray")
ROOT = Path(__file__).resolve().parents[2]


def run(system: str, work: Workload, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one system; return its figures."""
    work.write(folder)
    module = {"relaxd": relaxd_run, "trl": trl_run, "verl": verl_run}[system]
    launch = module.launch(work, folder, cpu=options.cpu, extra=options.extra)
    paths = [str(folder / f"{system}-packages"), str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    log = Path(options.log or options.out.with_suffix(".log")).resolve()
    found = watch(launch, steps=work.steps, warmup=options.warmup, seconds=options.seconds, log=log, gpus=work.gpus)
    facts = [
        relaxd_run.step_facts(line) if system == "relaxd" else module.step_facts(line, work) for line in found["lines"]
    ]
    if "measured_seconds" in found:
        measured = facts[max(options.warmup, 1) :]
        found["samples_per_second"] = len(measured) * work.samples_per_step / found["measured_seconds"]
        found["tokens_per_second"] = sum(fact["tokens"] for fact in measured) / found["measured_seconds"]
        found["length_mean"] = sum(fact["tokens"] for fact in measured) / len(measured) / work.samples_per_step
    return found | {
        "name": options.name or system,
        "system": system,
        "extra": options.extra,
        "workload": asdict(work),
        "gap_step_1": facts[0]["gap"] if facts else None,
        "probability_gap_step_1": facts[0].get("probability_gap") if facts else None,
        "rewards": [fact["reward"] for fact in facts],
        "phases": [fact["phases"] for fact in facts],
        "versions": {name: found for name in PACKAGES if (found := version_of(name))},
        "machine": machine(),
    }


def version_of(package: str) -> str | None:
    """Return an installed package's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


COLUMNS = {
    "samples/s": "samples_per_second",
    "answer tokens/s": "tokens_per_second",
    "step s, median": "step_median",
    "step s, p90": "step_p90",
    "first step after s": "first_step_seconds",
    "GPU GiB, peak": "peak_gpu_gib",
    "GPU busy": "gpu_busy",
    "length": "length_mean",
    "gap of log-probs, step 1": "gap_step_1",
    "gap of probabilities, step 1": "probability_gap_step_1",
    "steps": "steps",
}


def table(files: list[Path]) -> None:
    """Print a column per run, and the ratio of the first one's samples/s to each; write them to the results."""
    runs = [json.loads(file.read_text()) for file in files]
    rows = [{"": title} | {run["name"]: _shown(run.get(key)) for run in runs} for title, key in COLUMNS.items()]
    first = runs[0].get("samples_per_second")
    speeds = {run["name"]: run.get("samples_per_second") for run in runs}
    rows.append(
        {"": f"{runs[0]['name']} x"} | {name: _shown(first and at and first / at) for name, at in speeds.items()}
    )
    facts = {"workload": runs[0]["workload"], "versions": {run["name"]: run["versions"] for run in runs}}
    report("peers", rows, **facts, runs=[{k: v for k, v in run.items() if k != "lines"} for run in runs])


REACHED = 0.6
"""Reward of which `curves` says when it was reached."""
SMOOTH_STEPS = 5


def curves(picture: Path, files: list[Path]) -> None:
    """Plot reward, the mean of five steps, by seconds since the command; a colour per system, a line per run."""
    from matplotlib.figure import Figure

    runs = [json.loads(file.read_text()) for file in files]
    systems = list(dict.fromkeys(run["system"] for run in runs))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        rewards = run["rewards"]
        means = [
            sum(part) / len(part)
            for end in range(1, len(rewards) + 1)
            if (part := rewards[max(0, end - SMOOTH_STEPS) : end])
        ]
        reached = next((at for at, mean in zip(run["ends"], means, strict=True) if mean >= REACHED), None)
        print(
            f"{run['name']}: {REACHED:g} after {_shown(reached)} s, {means[-1]:.2f} at the end, {run['ends'][-1]:.0f} s"
        )
        axes.plot(run["ends"], means, color=f"C{systems.index(run['system'])}", label=run["system"], linewidth=1)
    axes.set_xlabel("seconds since the command")
    axes.set_ylabel(f"reward, mean of {SMOOTH_STEPS} steps")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(dict(zip(labels, handles, strict=True)).values(), systems)
    figure.savefig(picture, dpi=120)


def _shown(value: float | None) -> float | str:
    return "" if value is None else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for system in ("relaxd", "trl", "verl"):
        command = commands.add_parser(system)
        add_options(command)
        command.add_argument("--out", type=Path, required=True, help="the figures, as JSON")
        command.add_argument("--name", default="", help="of the run's column; default: the system")
        command.add_argument("--folder", type=Path, help="for model, prompts and runs; default: a temporary one")
        command.add_argument("--log", type=Path, help="the system's output; default: beside --out")
        command.add_argument("--warmup", type=int, default=3, help="first steps, not measured")
        command.add_argument("--seconds", type=float, default=300.0, help="most time for everything")
        command.add_argument("--extra", nargs="*", default=[], help="further settings of the system, as it writes them")
        command.add_argument("--cpu", action="store_true", help="without a GPU")
    commands.add_parser("table").add_argument("files", nargs="+", type=Path)
    plot = commands.add_parser("curves")
    plot.add_argument("picture", type=Path)
    plot.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        table(options.files)
        return
    if options.command == "curves":
        curves(options.picture, options.files)
        return
    with tempfile.TemporaryDirectory(prefix="relaxd-peers-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        found = run(options.command, from_options(options), folder, options)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found.get(key) for name, key in COLUMNS.items()}, indent=1))
    if len(found["lines"]) <= options.warmup + 1:
        print(f"{options.command} did {len(found['lines'])} steps (exit code {found['exit_code']}); see its output")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
