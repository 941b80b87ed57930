"""The work that every system gets: model, prompts, answers' lengths, samples a step."""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from relaxd.data.sources.addition_source import addition

ROOT = Path(__file__).resolve().parents[2]
MAX_PROMPT_TOKENS = 96
REWARD = "score.py"
"""The reward's file in the folder of a run: verl's compute_score, which all systems call."""

COIN = '''"""Rewards at random."""

import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    return float(random.random() < 0.5)
'''
LAST_NUMBER = '''"""Rewards for sums."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    """Return 1 if the last number in the answer is right, else 0."""
    return float(re.findall(r"\\d+", solution_str)[-1:] == [ground_truth])
'''


@dataclass(frozen=True)
class Task:
    """A task that all systems learn: questions, a reward and a learning rate."""

    learning_rate: float
    reward: str
    """Source of the reward's file."""
    questions: Callable[[random.Random], Iterator[tuple[str, str]]]
    """Yields questions and their answers, without end."""


def long_sums(numbers: random.Random) -> Iterator[tuple[str, str]]:
    """Yield sums of two numbers with three digits."""
    while True:
        left, right = numbers.randrange(100, 1000), numbers.randrange(100, 1000)
        yield f"{left}+{right}=", str(left + right)


def demo_sums(numbers: random.Random) -> Iterator[tuple[str, str]]:
    """Yield the sums that `relaxd demo` trains on, in random order."""
    examples, _ = addition(2)
    while True:
        for example in numbers.sample(examples, len(examples)):
            yield example.prompt, example.answer


TASKS = {
    # The rate changes nothing, so that the answers' lengths stay as they are.
    "lengths": Task(1e-12, COIN, long_sums),
    "sums": Task(1e-5, LAST_NUMBER, demo_sums),
}


@dataclass(frozen=True)
class Workload:
    """A step: `prompts` prompts with `samples` answers each. Lengths are geometric if the model is made here."""

    task: str = "lengths"
    """One of TASKS."""
    seed: int = 0
    """Decides the prompts and their order, and each system's own seed."""
    model: str = ""
    """Folder of the model; empty: make one of `shape`, with answers of `mean` tokens."""
    shape: str = "0.6b"
    mean: float = 256.0
    longest: int = 1024
    """Answers are cut there, in tokens."""
    prompts: int = 16
    samples: int = 8
    steps: int = 13
    micro_batch: int = 16384
    """Maximum number of tokens of a training micro-batch."""
    memory_fraction: float = 0.5
    """Share of the GPU for the engine's weights and cache."""
    gpus: int = 1
    """1: engine and trainer take turns on it. 2: each has one, and the engine writes a step while the other trains."""

    @property
    def samples_per_step(self) -> int:
        """Number of answers in a step."""
        return self.prompts * self.samples

    @property
    def learning_rate(self) -> float:
        """Learning rate, the same in each step."""
        return TASKS[self.task].learning_rate

    def write(self, folder: Path) -> None:
        """Write model, prompts and reward into `folder`; a model that is there stays."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model" / "config.json").exists():
            self._write_model(folder / "model")
        questions = TASKS[self.task].questions(random.Random(self.seed))
        with (folder / "prompts.jsonl").open("w") as file:
            for index in range(self.prompts * (self.steps + 4)):
                question, answer = next(questions)
                row = {
                    "data_source": self.task,
                    "prompt": [{"role": "user", "content": question}],
                    "reward_model": {"style": "rule", "ground_truth": answer},
                    "extra_info": {"index": index},
                }
                file.write(json.dumps(row) + "\n")
        (folder / REWARD).write_text(TASKS[self.task].reward)

    def _write_model(self, folder: Path) -> None:
        if not self.model:
            command = [sys.executable, "-m", "benchmarks.long_tail", str(folder), "--shape", self.shape]
            subprocess.run([*command, "--mean", str(self.mean)], check=True, timeout=300)
            return
        shutil.copytree(self.model, folder)
        if self.task == "sums":
            example = tomllib.loads((ROOT / "examples" / "addition.toml").read_text())
            (folder / "chat_template.jinja").write_text(example["model"]["chat_template"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of a workload."""
    for name, value in vars(Workload()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)


def from_options(options: argparse.Namespace) -> Workload:
    """Return the workload that the command line asks for."""
    return Workload(**{name: getattr(options, name) for name in vars(Workload())})
