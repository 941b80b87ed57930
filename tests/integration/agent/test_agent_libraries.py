"""Unmodified agent libraries lead conversations.

RELAXD_TEST_AGENTS_PYTHON (openai-agents), RELAXD_TEST_LANGGRAPH_PYTHON (langchain, langgraph, langchain-openai) and
RELAXD_TEST_VERIFIERS_PYTHON (verifiers 0.4, uv, and relaxd's own requirements) name interpreters that have them;
without one, its tests are skipped.
"""

import os

import pytest

from relaxd.data.tokenizer import PromptTokenizer
from tests.integration.agent.function_kit import holding as holding_a_function
from tests.integration.agent.library_kit import (
    DOUBLED,
    PACKAGES,
    PROGRAMS,
    SOLVE,
    TWO_CALLS,
    WAYS,
    call,
    verifiers_settings,
    verifiers_variables,
)
from tests.integration.agent.program_kit import check_tokens, holding, tokenizer
from tests.integration.agent.scripted_engines import Fleet

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]

__all__ = ["tokenizer"]


def interpreter(library: str) -> str:
    """The interpreter that has a library; skips the test without one."""
    variable = f"RELAXD_TEST_{library.upper()}_PYTHON"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no interpreter with {PACKAGES[library]}")
    return os.environ[variable]


@pytest.mark.parametrize(("library", "way"), WAYS)
async def test_a_library_is_trained_on_the_engines_tokens(tokenizer: PromptTokenizer, library: str, way: str) -> None:
    fleet = Fleet(TWO_CALLS, versions=[3])
    async with holding(tokenizer, fleet, f"{library}-{way}", program=(interpreter(library), PROGRAMS)) as held:
        result = await held.hold()
    assert result.failure == ""
    assert (result.finish, result.turns, result.reward, result.tool_calls) == ("env_done", 2, 1.0, 2)
    check_tokens(fleet, TWO_CALLS, result)
    roles = [message["role"] for message in result.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]


async def test_a_task_of_verifiers_is_led_by_its_bash_harness(
    tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter("verifiers")
    for name, value in verifiers_variables(python).items():
        monkeypatch.setenv(name, value)
    again = [call("bash", {"command": f"echo 12 > sum.txt  # {number}"}) for number in range(3)]
    fleet = Fleet([*DOUBLED, *again], versions=[3])
    settings = verifiers_settings(max_turns=3)
    async with holding_a_function(tokenizer, fleet, SOLVE, python=python, settings=settings) as held:
        result = await held.hold(idx=0)
        check_tokens(fleet, DOUBLED, result)
        limited = await held.hold(idx=1)
    assert result.failure == ""
    assert (result.finish, result.turns, result.reward, result.tool_calls) == ("env_done", 3, 3.0, 2)
    assert result.info == {"length": 9.0, "right": 1.0, "written": 1.0}
    # verifiers' own limit ends the task, which is scored.
    assert (limited.failure, limited.finish, limited.turns, limited.reward) == ("", "env_done", 3, 1.0)
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["10", ""]
