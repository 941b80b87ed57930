"""The work that every system gets: model, prompts, answers' lengths, samples a step."""

import argparse
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_PROMPT_TOKENS = 96
LEARNING_RATE = 1e-12
"""Changes nothing, so that the answers' lengths stay as they are."""


@dataclass(frozen=True)
class Workload:
    """A step: `prompts` prompts with `samples` answers each, of geometric length."""

    shape: str = "0.6b"
    mean: float = 256.0
    """Mean answer, in tokens."""
    longest: int = 1024
    """Answers are cut there, in tokens."""
    prompts: int = 16
    samples: int = 8
    steps: int = 13
    micro_batch: int = 16384
    """Maximum number of tokens of a training micro-batch."""
    memory_fraction: float = 0.5
    """Share of the GPU for the engine's weights and cache."""

    @property
    def samples_per_step(self) -> int:
        """Number of answers in a step."""
        return self.prompts * self.samples

    def write(self, folder: Path) -> None:
        """Write model, prompts and reward into `folder`, unless they are there."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model" / "config.json").exists():
            command = [sys.executable, "-m", "benchmarks.long_tail", str(folder / "model"), "--shape", self.shape]
            subprocess.run([*command, "--mean", str(self.mean)], check=True, timeout=300)
        rows = random.Random(0)
        with (folder / "prompts.jsonl").open("w") as file:
            for index in range(self.prompts * (self.steps + 4)):
                left, right = rows.randrange(100, 1000), rows.randrange(100, 1000)
                row = {
                    "data_source": "sums",
                    "prompt": [{"role": "user", "content": f"{left}+{right}="}],
                    "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                    "extra_info": {"index": index},
                }
                file.write(json.dumps(row) + "\n")
        (folder / "coin.py").write_text(COIN)


COIN = '''"""Rewards at random, as verl calls them."""

import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    return float(random.random() < 0.5)
'''


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of a workload."""
    for name, value in vars(Workload()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)


def from_options(options: argparse.Namespace) -> Workload:
    """Return the workload that the command line asks for."""
    return Workload(**{name: getattr(options, name) for name in vars(Workload())})
