"""Tiny models get better in bundled environments: the Python sandbox, search, a text game, reasoning-gym with hints.

The calculator is trained with in test_tool_use.py, and nim, for two players, in test_two_players.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.conftest import Workplace
from tests.e2e.environment_beginners import CODES, DOORS, GUESSING, door_fact
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.processes import run_python

GROUPS = 8
"""Groups of a step, of 8 conversations each."""
CONFIG = """
[run]
steps = {steps}

[model]
path = "model"

[data]
{data}
max_prompt_tokens = 128

[agent]
environment = "{environment}"
settings = {settings}

[reward]
name = "{reward}"
workers = 1

[rollout]
samples_per_prompt = 8
max_new_tokens = 96
threads = 1

[algorithm]
drop_zero_variance = false

[trainer]
groups_per_step = {groups}
threads = 1

[trainer.optimizer]
lr = {lr}

[board]
max_staleness = 0

[eval]
prompts = 0
"""
FILE = """
source = "files"
path = "prompts.jsonl"
"""
GCD = """
source = "reasoning_gym"
reasoning_gym.task = "gcd"
reasoning_gym.settings = {min_numbers = 2, max_numbers = 2, min_value = 1, max_value = 9}
reasoning_gym.size = 200
reasoning_gym.held_out = 0
"""


@dataclass(frozen=True)
class Case:
    """A run with one environment."""

    settings: str
    metric: str
    """A number of the environment's that the model has an influence on."""
    grows: bool
    """True if the number is higher for a better model, False if it is lower."""
    data: str = FILE
    reward: str = "environment"
    steps: int = 16
    lr: float = 1e-3


CASES = {
    "python": Case("{}", "calls", True),
    "search": Case('{corpus = "corpus.jsonl", results = 1}', "calls", True, reward="exact_match"),
    "number_guessing": Case(
        "{" + ", ".join(f"{name} = {value}" for name, value in GUESSING.items()) + "}",
        "guesses",
        False,
        steps=48,
        lr=3e-4,
    ),
    "reasoning_gym": Case('{tries = 2, hint = "beginning"}', "tries", False, GCD, steps=24),
}


def write_data(folder: Path) -> None:
    """Write prompts and corpus."""
    random = Random(1)
    codes = {door: random.choice(CODES) for door in DOORS}
    sums = [(random.randint(10, 99), random.randint(10, 99)) for _ in range(200)]
    prompts = {
        "python": [(f"What is {a} + {b}?", str(a + b)) for a, b in sums],
        "search": [(f"What is the code of door {door}?", str(code)) for door, code in codes.items()],
        "number_guessing": [("Guess my number.", "")] * 4,
    }
    for name, rows in prompts.items():
        write_rows(folder / f"{name}.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in rows])
    write_rows(folder / "corpus.jsonl", [{"text": door_fact(door, code)} for door, code in codes.items()])


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.night
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_model_gets_better_in_a_bundled_environment(workplace: Workplace, name: str) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="needs the extra reasoning")
    case, folder = CASES[name], workplace.folder
    write_data(folder)
    taught = run_python("-m", "tests.e2e.environment_beginners", name, str(folder / "model"), seconds=300)
    assert taught.returncode == 0, taught.stderr
    values = {"environment": name, "settings": case.settings, "reward": case.reward, "steps": case.steps, "lr": case.lr}
    data = case.data.replace("prompts.jsonl", f"{name}.jsonl")
    (folder / "bundled.toml").write_text(CONFIG.format(data=data, groups=GROUPS, **values))
    code, output = workplace.relaxd("run", "bundled.toml", "--run-id", "bundled", timeout=800)
    assert code == 0, output
    found = folder / "runs" / "bundled"
    check_books(read_summary(found), case.steps, GROUPS)
    steps = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]

    def ends(metric: str) -> tuple[float, float]:
        """Return the means of the first two and of the last four steps, 128 and 256 conversations."""
        numbers = [step[metric] for step in steps]
        return sum(numbers[:2]) / 2, sum(numbers[-4:]) / 4

    before, after = ends("reward_mean")
    assert after > before + 0.2, f"{[round(step['reward_mean'], 2) for step in steps]}"
    before, after = ends(f"environment/{case.metric}")
    assert after > before if case.grows else after < before
    assert all(step["tool_errors_mean"] < 0.2 for step in steps[-4:])
