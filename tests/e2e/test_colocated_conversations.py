"""A colocated run whose engine sleeps while a conversation waits for its tool."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Workplace
from tests.e2e.echo_environment import MODES
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.waiting import wait_until

STEPS = 3
TOOL = """
import asyncio, pathlib

class Tool:
    async def step(self, reply):
        if pathlib.Path("slow").exists():
            pathlib.Path("asked").touch()
            while not pathlib.Path("answer").exists():
                await asyncio.sleep(0.05)
        data = reply.text.encode()
        return "Go on.", sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
"""


def moves(folder: Path) -> list[str]:
    """Return the GPU handoffs so far, in order."""
    lines = (folder / "logs" / "coordinator.log").read_text().splitlines()
    return [move for line in lines for move in ("train", "synchronise") if f" {move}: done" in line]


@pytest.mark.night
@pytest.mark.timeout(900)
def test_a_conversation_that_waits_for_its_tool_finds_its_engine_again(workplace: Workplace) -> None:
    (workplace.folder / "tool.py").write_text(TOOL)
    run = workplace.start(
        *("run", "tiny.toml", "--run.steps", str(STEPS), "--run-id", "slow", *MODES["colocated"]),
        *("--eval.prompts", "2", "--reward.name", "environment"),
        *("--agent.environment", "tool.py:Tool", "--agent.max_turns", "3", "--agent.call_seconds", "3000"),
        *("--agent.conversation_seconds", "3000", "--rollout.max_new_tokens", "200", "--agent.turn_tokens", "20"),
        *("--rollout.stop_token_ids", json.dumps([2, *range(40, 140)])),  # random models rarely end a message
    )
    folder = workplace.folder / "runs" / "slow"

    def steps() -> int:
        metrics = folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    wait_until(lambda: steps() >= 2, "a step", 300)
    (workplace.folder / "slow").touch()
    wait_until((workplace.folder / "asked").exists, "a slow call of the tool", 120)
    named = re.compile(r"lacks \d of its 2 groups; .* with agent: waiting for the environment of conversation 0-")
    wait_until(lambda: named.search(workplace.relaxd("why", "slow")[1]), "the tool in relaxd why", 240)
    code, output = workplace.relaxd("pause", "slow")
    assert code == 0, output
    before = len(moves(folder))
    code, output = workplace.relaxd("checkpoint", "slow")  # for which the trainer gets the device
    assert code == 0, output
    assert "train" in moves(folder)[before:]
    (workplace.folder / "answer").touch()
    code, output = workplace.relaxd("resume", "slow")
    assert code == 0, output
    output = run.communicate(timeout=240)[0]
    assert run.returncode == 0, output

    summary = read_summary(folder)
    check_books(summary, STEPS)
    assert not summary["dropped_by_reason"]
    assert summary["notes"] == []
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = Counter(group for entry in ledger for group in entry["plan"]["groups"])
    assert set(trained.values()) == {1}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["staleness_max"] == 0
        assert 1 < line["turns_mean"] <= line["turns_max"] <= 3
    assert [one["step"] for one in summary["evaluations"]] == [0, STEPS]
