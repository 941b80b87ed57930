"""TRL's GRPOTrainer on one GPU, with the fastest generation that it has without vLLM."""

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers import flash_attention
from benchmarks.peers.watch import Launch
from benchmarks.peers.workload import Workload


def launch(work: Workload, folder: Path, *, cpu: bool, extra: list[str]) -> Launch:
    """Return the run's command.

    `extra`: generation=plain, static or continuous; batch=SAMPLES of a forward; weights=float32, to keep weights in
    float32 and compute in bfloat16, as a real learning rate needs it.
    """
    if work.gpus > 1:
        raise SystemExit("TRL generates on GPUs of its own with vLLM only: leave --gpus out")
    if find_spec("trl") is None:
        raise SystemExit("TRL is not installed: pip install trl==1.16.0")
    flash_attention.provide(folder / "trl-packages")
    chosen = dict(word.split("=", 1) for word in extra)
    options = {
        "work": asdict(work),
        "cpu": cpu,
        "generation": chosen.pop("generation", "plain" if cpu else "continuous"),
        "dtype": chosen.pop("weights", "float32" if cpu else "bfloat16"),
        "batch": int(chosen.pop("batch", min(16, work.samples_per_step))),
    }
    if chosen:
        raise SystemExit(f"--extra has {sorted(chosen)}: generation, batch and weights are known for TRL")
    (folder / "trl.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.peers.trl_train", str(folder), json.dumps(options)]
    return Launch(command, folder, folder / "trl.jsonl", lambda line: "loss" in line)


def step_facts(line: dict[str, Any], work: Workload) -> dict[str, Any]:
    """Return a step's answer tokens and mean reward; TRL computes log-probs only once, so there is no gap."""
    return {
        "tokens": work.samples_per_step * line["completions/mean_length"],
        "reward": line["reward"],
        "gap": None,
        "phases": {"step": line.get("step_time")},
    }
