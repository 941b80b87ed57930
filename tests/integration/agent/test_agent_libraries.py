"""Unmodified agent libraries lead conversations.

RELAXD_TEST_AGENTS_PYTHON (openai-agents), RELAXD_TEST_LANGGRAPH_PYTHON (langchain, langgraph, langchain-openai) and
RELAXD_TEST_VERIFIERS_PYTHON (verifiers 0.4, uv, and relaxd's own requirements) name interpreters that have them;
without one, its tests are skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from relaxd.data.tokenizer import PromptTokenizer
from tests.integration.agent.scripted_engines import Fleet
from tests.integration.agent.test_functions import holding as holding_a_function
from tests.integration.agent.test_programs import CALLS, SUMS, check_tokens, holding, tokenizer

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]

__all__ = ["tokenizer"]
PROGRAMS = str(Path(__file__).with_name("library_programs.py"))
SOLVE = "relaxd.envs.libraries.verifiers_harness:solve"
TASKSET = "tests.integration.envs.verifiers_tasks:WithTools"
PACKAGES = {
    "agents": "openai-agents",
    "langgraph": "langchain, langgraph and langchain-openai",
    "verifiers": "verifiers 0.4, uv and relaxd's requirements",
}


def interpreter(library: str) -> str:
    """The interpreter that has a library; skips the test without one."""
    variable = f"RELAXD_TEST_{library.upper()}_PYTHON"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no interpreter with {PACKAGES[library]}")
    return os.environ[variable]


@pytest.mark.parametrize("how", ["chat", "chat-streamed", "responses", "responses-streamed"])
@pytest.mark.parametrize("library", ["agents", "langgraph"])
async def test_a_library_is_trained_on_the_engines_tokens(tokenizer: PromptTokenizer, library: str, how: str) -> None:
    texts = [f"<think>Add.</think>{CALLS}", SUMS]
    fleet = Fleet(texts, versions=[3])
    async with holding(tokenizer, fleet, f"{library}-{how}", program=(interpreter(library), PROGRAMS)) as held:
        result = await held.hold()
    assert result.failure == ""
    assert (result.finish, result.turns, result.reward, result.tool_calls) == ("env_done", 2, 1.0, 2)
    check_tokens(fleet, texts, result)
    roles = [message["role"] for message in result.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_a_task_of_verifiers_is_led_by_its_bash_harness(
    tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter("verifiers")
    monkeypatch.setenv("PATH", f"{Path(python).parent}:{os.environ['PATH']}")  # uv is there
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    texts = [
        call("integers_double", {"number": 5}),
        call("bash", {"command": "echo $((5 * 2)) > sum.txt"}),
        "It is 10.",
    ]
    again = [call("bash", {"command": f"echo 12 > sum.txt  # {number}"}) for number in range(3)]
    fleet = Fleet([*texts, *again], versions=[3])
    config = {"harness": {"id": "bash", "edit": False}, "max_turns": 3}
    settings = {"taskset": TASKSET, "agent_config": config}
    async with holding_a_function(tokenizer, fleet, SOLVE, python=python, settings=settings) as held:
        result = await held.hold(idx=0)
        check_tokens(fleet, texts, result)
        limited = await held.hold(idx=1)
    assert result.failure == ""
    assert (result.finish, result.turns, result.reward, result.tool_calls) == ("env_done", 3, 3.0, 2)
    assert result.info == {"length": 9.0, "right": 1.0, "written": 1.0}
    # verifiers' own limit ends the task, which is scored.
    assert (limited.failure, limited.finish, limited.turns, limited.reward) == ("", "env_done", 3, 1.0)
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["10", ""]
