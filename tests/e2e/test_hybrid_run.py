"""Runs of tiny random models whose first layer has a gated delta net: they learn, and engine and trainer agree."""

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.conftest import open_workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model

STEPS = 30
SETTINGS = ("--rollout.samples_per_prompt", "8", "--trainer.optimizer.lr", "1e-2", "--eval.prompts", "0")


@pytest.mark.night
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_model_with_gated_delta_nets_learns(tmp_path: Path, architecture: str) -> None:
    model = make_tiny_model(tmp_path / "hybrid", architecture=architecture)
    with open_workplace(tmp_path, model) as place:
        run = ("run", "tiny.toml", "--run-id", "hybrid", "--run.steps", str(STEPS))
        code, output = place.relaxd(*run, *SETTINGS, timeout=500)
    assert code == 0, output
    folder = tmp_path / "runs" / "hybrid"
    check_books(read_summary(folder), steps=STEPS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2, rewards
    gaps = [line["logprob_difference_max"] for line in lines if "logprob_difference_max" in line]
    assert gaps
    assert max(gaps) < 1e-4
