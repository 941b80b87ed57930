"""A run whose reference, teacher, critic and judge are containers, which its configuration places."""

import json
from pathlib import Path

import pytest

from relaxd.config.load_toml import load_file
from relaxd.config.write_toml import dump
from tests.compose.stack import Run, Stack, running
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow
REWARD = """
from relaxd.rewards import judge
from tiny_reward import letters

async def asked(sample):
    said = await judge.ask(sample.response)
    return {**letters(sample), "said": float(len(said) > 0)}
"""
SETTINGS = {
    "run.steps": "3",
    "eval.prompts": "0",
    "algorithm.name": "ppo",
    "algorithm.kl_coef": "0.01",
    "algorithm.distill_loss_coef": "0.1",
    "reward.name": "asked_reward:asked",
    "roles.reference.placement": "service",
    "roles.critic.placement": "service",
    "roles.critic.threads": "1",
    "roles.reference.threads": "1",
    "roles.teacher.model": "tiny",
    "roles.teacher.threads": "1",
    "roles.judge.model": "tiny",
    "roles.judge.threads": "1",
    "roles.judge.max_new_tokens": "4",
    "placement.replicas": "{ reward = 2 }",
}


@pytest.mark.timeout(900)
def test_each_role_does_its_part_in_a_container_of_its_own(stack: Stack, tmp_path: Path) -> None:
    asked = stack.examples / "asked_reward.py"
    asked.write_text(REWARD)
    asked.chmod(0o644)
    words = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    placed = stack.examples / "placed.toml"
    placed.write_text(dump(load_file(stack.examples / "tiny.toml", words)))
    placed.chmod(0o644)
    with running(stack, {}, placed):
        assert len(stack.replicas("reward")) == 2
        stack.compose("cp", str(tmp_path / "tiny"), "coordinator:/models/")
        run = Run(stack, "examples/placed.toml", "--run-id", "roles")
        run.reach(1)
        wait_until(
            lambda: all(one.status.done_groups > 0 for one in stack.replicas("reward")),
            "groups of both reward replicas, which their heartbeats tell of",
            60,
        )
        for role in ("reference", "teacher"):
            wait_until(lambda role=role: stack.replicas(role)[0].status.done_groups > 0, f"groups of the {role}", 60)
        run.finish()
        printed = stack.compose("run", "--rm", "--no-deps", "--no-TTY", "cli", "metrics", "roles", "--json")
    step = json.loads(printed.splitlines()[-1])
    assert step["kl"] != 0
    assert step["teacher_kl"] != 0
    assert step["value_loss"] > 0
    assert step["reward_said"] == 1
