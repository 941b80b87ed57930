"""The demo of tools: a tiny model learns to call a calculator. Without the tool it learns nothing."""

import json
from pathlib import Path

import pytest

from relaxd.cli.preparing.first_steps import example
from tests.e2e.conftest import Workplace

STEPS = 40


def accuracies(folder: Path) -> tuple[float, float]:
    """Return the accuracy of the first 64 conversations, and that of the last 320."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
    assert len(rewards) == STEPS
    return rewards[0], sum(rewards[-5:]) / 5


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_a_model_learns_to_use_a_tool(workplace: Workplace) -> None:
    models = {"RELAXD_MODELS": str(workplace.folder / "models")}
    code, output = workplace.relaxd("demo", "--task", "tool-use", "--run-id", "with", timeout=900, **models)
    assert code == 0, output
    before, after = accuracies(workplace.folder / "runs" / "with")
    assert before < 0.3
    assert after > 0.85

    words = ("--run-id", "without", "--agent.environment", "")
    code, output = workplace.relaxd("run", str(example("tool-use.toml")), *words, timeout=900, **models)
    assert code == 0, output
    _, after = accuracies(workplace.folder / "runs" / "without")
    assert after < 0.1
