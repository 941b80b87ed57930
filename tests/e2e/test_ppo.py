"""A run of PPO, whose every process is killed, goes on with policy and critic as they were."""

import json
from pathlib import Path

import pytest

from relaxd.local.state import StateFolder
from tests.e2e.conftest import Workplace
from tests.e2e.test_resume import kill_everything_at
from tests.e2e.test_run import check_books, read_summary

SETTINGS = (
    *("--run.steps", "9", "--board.lease_seconds", "3", "--eval.prompts", "0"),
    *("--trainer.checkpoint.every", "3", "--trainer.checkpoint.keep_step_files", "always"),
    *("--algorithm.name", "ppo", "--algorithm.old_logprobs", "current", "--rollout.samples_per_prompt", "1"),
    *("--trainer.mini_batches", "2", "--trainer.epochs", "2", "--roles.critic.optimizer.lr", "1e-2"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_policy_and_critic_go_on_after_everything_was_killed(workplace: Workplace, tiny_model: Path) -> None:
    state = StateFolder(workplace.folder / ".relaxd")
    folder = workplace.folder / "runs" / "r"
    kill_everything_at(workplace.start("run", "tiny.toml", "--run-id", "r", *SETTINGS), state, iter([4]))
    code, output = workplace.relaxd("resume", "r", timeout=240)
    assert code == 0, output
    check_books(read_summary(folder), steps=9)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert all(line["value_loss"] > 0 for line in lines)
    assert any("explained_variance" in line for line in lines)  # none in a step whose returns are all equal
    assert lines[-1]["optimizer_steps"] == 36
    # The checksum compared is that of both models.
    code, output = workplace.relaxd("replay", "r", "--step", "5")
    assert code == 0, output
    assert output.count("the same") == 4, output
