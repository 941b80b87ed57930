"""verl's tools in real reward processes: tools that block, and a tiny run that learns to call one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AddedToken, AutoTokenizer

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from services.reward.worker_pool import Failure, WorkerPool
from tests.e2e.conftest import Workplace, open_workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import CHAT_TEMPLATE, make_tiny_model
from tests.kit.processes import python_path

TOOL = '''
import os
import time
from pathlib import Path

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Give(BaseTool):
    """Give a coin: its value is the step reward."""

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        if parameters.get("block"):
            time.sleep(3600)
        if parameters.get("die"):
            os._exit(3)
        return ToolResponse(text="thank you"), parameters["value"] / 60, {}

    async def release(self, instance_id, **kwargs):
        with Path("released").open("a") as file:
            file.write(f"{instance_id}\\n")
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "give",
        "description": "Give a coin.",
        "parameters": {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]},
    },
}
STEPS = 3
VALUES = range(61)


def call(**arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'give', 'arguments': arguments}, separators=(',', ':'))}</tool_call>"


def write_tools(folder: Path) -> Path:
    (folder / "coins.py").write_text(TOOL)
    tools = [{"class_name": "coins.Give", "config": {"type": "native"}, "tool_schema": SCHEMA}]
    (folder / "tools.yaml").write_text(json.dumps({"tools": tools}))  # JSON is YAML
    return folder / "tools.yaml"


async def test_a_tool_that_blocks_or_dies_fails_its_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml", reason="needs PyYAML")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path, Path.cwd()))
    settings = {"config": str(write_tools(tmp_path))}
    config = RewardConfig(name="verl_tools", settings=settings, writable=(str(tmp_path),))
    monkeypatch.chdir(tmp_path)
    pool = WorkerPool(2, config)
    replies = (call(value=30), call(block=1), call(die=1), call(value="a"), "no call")
    outcomes = await pool.score("", [RewardInput(prompt="?", response=one) for one in replies], 2.0)
    pool.close()
    given, blocked, died, wrong, silent = outcomes
    assert given == RewardOutput(0.5, {"calls": 1.0, "errors": 0.0})
    assert isinstance(blocked, Failure)
    assert "took longer than 2 s" in blocked.reason
    assert isinstance(died, Failure)
    assert "exit code 3" in died.reason
    assert wrong == RewardOutput(0.0, {"calls": 1.0, "errors": 1.0})
    assert silent == RewardOutput(0.0, {"calls": 0.0, "errors": 0.0})
    assert len((tmp_path / "released").read_text().splitlines()) >= 3


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """A model for which each call is one token, so that a random one calls now and then."""
    model = make_tiny_model(tmp_path / "model", vocab_size=259 + len(VALUES))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([AddedToken(call(value=value), normalized=False) for value in VALUES])
    assert len(tokenizer) == 259 + len(VALUES)
    tokenizer.chat_template = "{% if tools %}{{ tools | length }} tool: {{ tools[0].function.name }} {% endif %}"
    tokenizer.chat_template += CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    with open_workplace(tmp_path, model) as place:
        yield place


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_run_is_rewarded_for_its_calls(workplace: Workplace) -> None:
    pytest.importorskip("yaml", reason="needs PyYAML")
    write_tools(workplace.folder)
    code, output = workplace.relaxd(
        *("run", "tiny.toml", "--run.steps", str(STEPS), "--run-id", "calling", "--data.tools_file", "tools.yaml"),
        *("--reward.name", "verl_tools", "--reward.settings", '{config = "tools.yaml"}', "--eval.prompts", "0"),
        *("--reward.writable", '["."]'),  # the tool leaves a file
    )
    assert code == 0, output
    folder = workplace.folder / "runs" / "calling"
    check_books(read_summary(folder), STEPS)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step["reward_calls"] > 0
        assert step["reward_errors"] == 0
        assert 0 < step["reward_mean"] <= step["reward_calls"]
    released = (workplace.folder / "released").read_text().splitlines()
    assert len(set(released)) == len(released) >= STEPS * 2 * 4
