"""Unmodified agent libraries lead conversations.

RELAXD_TEST_AGENTS_PYTHON (openai-agents) and RELAXD_TEST_LANGGRAPH_PYTHON (langchain, langgraph, langchain-openai) name
interpreters that have them; without one, its tests are skipped.
"""

import os
from pathlib import Path

import pytest

from relaxd.data.tokenizer import PromptTokenizer
from tests.integration.agent.scripted_engines import Fleet
from tests.integration.agent.test_programs import CALLS, SUMS, check_tokens, holding, tokenizer

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]

__all__ = ["tokenizer"]
PROGRAMS = str(Path(__file__).with_name("library_programs.py"))
PACKAGES = {"agents": "openai-agents", "langgraph": "langchain, langgraph and langchain-openai"}


@pytest.mark.parametrize("how", ["chat", "chat-streamed", "responses", "responses-streamed"])
@pytest.mark.parametrize("library", PACKAGES)
async def test_a_library_is_trained_on_the_engines_tokens(tokenizer: PromptTokenizer, library: str, how: str) -> None:
    variable = f"RELAXD_TEST_{library.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no interpreter with {PACKAGES[library]}")
    texts = [f"<think>Add.</think>{CALLS}", SUMS]
    fleet = Fleet(texts, versions=[3])
    async with holding(tokenizer, fleet, f"{library}-{how}", program=(python, PROGRAMS)) as held:
        result = await held.hold()
    assert result.failure == ""
    assert (result.finish, result.turns, result.reward, result.tool_calls) == ("env_done", 2, 1.0, 2)
    check_tokens(fleet, texts, result)
    roles = [message["role"] for message in result.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
