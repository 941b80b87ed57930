"""Runs with an environment whose conversations are slow, and those that go on later and are repeated by name."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relaxd.seeds import seed_of
from tests.e2e.conftest import Workplace
from tests.e2e.interrupted_runs import saved_step, until
from tests.kit.finished_runs import check_books, check_receipts, read_summary

STEPS = 8
SLOW = 3
"""Groups are slow whose seed this divides."""
ENVIRONMENT = f"""
import asyncio, pathlib

class Task:
    def __init__(self, seconds):
        self.seconds = seconds

    def open(self, sample):
        self.seconds *= sample.seed % {SLOW} == 0
        with open("opened", "a") as file:
            file.write(f"{{sample.seed}}\\n")

    async def step(self, reply):
        await asyncio.sleep(self.seconds)
        data = reply.text.encode()
        return "Go on.", sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
"""
SETTINGS = (
    *("--run.steps", str(STEPS), "--eval.prompts", "0", "--reward.name", "environment", "--run.seed", "3"),
    *("--agent.environment", "task.py:Task", "--agent.max_turns", "2"),
    *("--rollout.max_new_tokens", "200", "--agent.turn_tokens", "20"),
    *("--rollout.stop_token_ids", json.dumps([2, *range(40, 140)])),  # random models rarely end a message
    *("--algorithm.drop_zero_variance", "false"),
    *("--weights.verify", "always"),
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_groups(folder: Path) -> Counter[str]:
    """Return how often each group was trained on."""
    return Counter(group for entry in lines_of(folder / "ledger.jsonl") for group in entry["plan"]["groups"])


def is_slow(group: str) -> bool:
    """Return True if a group's conversations are slow: all of its samples open the environment with one seed."""
    return seed_of(3, group) % SLOW == 0


@pytest.mark.night
@pytest.mark.timeout(600)
def test_slow_conversations_are_waited_for_and_trained_like_others(workplace: Workplace) -> None:
    """Their first message is soon too old for later steps, so that a step must take them, however long they last."""
    (workplace.folder / "task.py").write_text(ENVIRONMENT)
    code, output = workplace.relaxd(
        *("run", "tiny.toml", "--run-id", "slow", *SETTINGS, "--agent.settings", "{seconds = 3}"), timeout=500
    )
    assert code == 0, output
    folder = workplace.folder / "runs" / "slow"
    summary = read_summary(folder)
    check_books(summary, STEPS)
    check_receipts(folder)
    assert set(summary["dropped_by_reason"]) <= {"run_ended"}
    fates = {fate["group"]: fate for fate in lines_of(folder / "groups.jsonl")}
    trained = trained_groups(folder)
    published = sorted(fates, key=lambda group: int(group.split("-")[1]))
    # Only the newest prompts may still be open after the last step.
    for kind in (True, False):
        of_kind = [group for group in published[: 2 * STEPS] if is_slow(group) == kind]
        assert of_kind
        assert [group for group in of_kind if group not in trained] == []


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_run_with_an_environment_is_resumed_and_replayed_by_name(workplace: Workplace) -> None:
    (workplace.folder / "task.py").write_text(ENVIRONMENT)
    words = ("--agent.settings", "{seconds = 1}", "--trainer.checkpoint.keep_step_files", "always")
    process = workplace.start("run", "tiny.toml", "--run-id", "later", *SETTINGS, *words)
    assert process.stdout is not None
    until(process.stdout, "^step +3/")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=180)
    assert process.returncode == 130, rest
    assert 3 <= saved_step(rest) < STEPS
    before = len((workplace.folder / "opened").read_text().splitlines())

    code, output = workplace.relaxd("resume", "later", timeout=300)
    assert code == 0, output
    folder = workplace.folder / "runs" / "later"
    check_books(read_summary(folder), STEPS)
    assert [entry["step"] for entry in lines_of(folder / "ledger.jsonl")] == list(range(1, STEPS + 1))
    assert set(trained_groups(folder).values()) == {1}
    assert len((workplace.folder / "opened").read_text().splitlines()) > before  # the environment was hosted again
    steps = lines_of(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(1 <= step["turns_mean"] <= 2 for step in steps)

    # Its answers are in its step files: no environment is asked.
    opened = (workplace.folder / "opened").read_text()
    (workplace.folder / "task.py").unlink()
    code, output = workplace.relaxd("replay", "later", "--step", str(STEPS))
    assert code == 0, output
    assert output.count("the same") >= 3, output
    assert (workplace.folder / "opened").read_text() == opened
