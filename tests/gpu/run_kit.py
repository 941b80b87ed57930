"""Runs on GPUs, and colocated ones."""

import json
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.e2e.conftest import REWARD, Workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model

CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"

[data]
source = "addition"
digits = 2
max_prompt_tokens = 128

[reward]
name = "tiny_reward:even_bytes"
workers = 1

[rollout]
engine = "sglang"
dtype = "bfloat16"
samples_per_prompt = 8
max_new_tokens = 64
max_running_samples = 64
memory_fraction = 0.2

[rollout.sglang]
attention_backend = "triton"
sampling_backend = "pytorch"
disable_cuda_graph = true

[trainer]
dtype = "bfloat16"
groups_per_step = 4
micro_batch_tokens = 4096

[trainer.optimizer]
lr = 1e-5

[weights]
transport = "nccl"

[eval]
prompts = 16
"""
STEPS = 4
DEADLINE_SECONDS = 280.0
"""Of the run, whose engine alone may take a minute to start."""
CHANGES = (
    ("steps = {steps}", "steps = {steps}\ncolocate = true"),
    ("memory_fraction = 0.2", "memory_fraction = 0.5"),
    ('transport = "nccl"', 'transport = "cuda_ipc"\nverify = "always"'),
    ("[eval]", "[board]\nmax_staleness = 0\n\n[eval]"),
)


def make_workplace(folder: Path, changes: Sequence[tuple[str, str]], **model: Any) -> Workplace:
    """A random model and a configuration."""
    make_tiny_model(folder / "model", dtype=torch.bfloat16, **model)
    (folder / "tiny_reward.py").write_text(REWARD)
    config = CONFIG
    for old, new in changes:
        assert old in config, old
        config = config.replace(old, new)
    (folder / "run.toml").write_text(config.format(model=folder / "model", steps=STEPS))
    return Workplace(folder)


def train(place: Workplace, *, difference: float = 0.03, **environment: str) -> tuple[Path, list[dict[str, Any]]]:
    """Do the run; returns its folder and the lines of its steps. `difference`: of log-probs, at most."""
    process = place.start("run", "run.toml", "--run-id", "colocated", **environment)
    late = threading.Timer(DEADLINE_SECONDS, process.terminate)  # so that the logs are shown
    late.start()
    assert process.stdout is not None
    output = list(process.stdout)
    late.cancel()
    logs = place.folder / ".relaxd" / "logs"
    tails = "".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(logs.glob("*.log")))
    assert process.wait(timeout=60) == 0, "".join(output) + tails

    folder = place.folder / "runs" / "colocated"
    summary = read_summary(folder)
    check_books(summary, steps=STEPS, groups_per_step=4)
    assert summary["notes"] == []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    print(json.dumps(lines, indent=1))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert math.isfinite(line["loss"])
        assert line["staleness_max"] == 0
        assert line["logprob_difference"] < difference
    log = (folder / "logs" / "coordinator.log").read_text()
    assert not re.search("weight synchronisation .* failed|GPU handoff: ", log), log
    return folder, lines
