"""Conversations of the agent service: those that can't begin, and what is counted of their calls."""

from pathlib import Path
from typing import Any, cast

import pytest

from relaxd.config import RunConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.environment import ToolCall
from relaxd.envs.replies import ParsedReply, reply_format
from services.agent.conversation import Conversation, EnvironmentConversations
from services.agent.environments import Environments
from services.agent.model_turns import BadPrompt, PolicyModel
from tests.kit.models import make_tiny_model


async def test_tools_need_a_chat_template_with_tool_calls(tmp_path: Path) -> None:
    """Else no call would be found, and the model could never learn to use a tool."""
    values = {
        "run": {"steps": 1},
        "model": {"path": str(make_tiny_model(tmp_path / "model"))},
        "data": {"source": "addition"},
        "reward": {"name": "environment"},
        "agent": {"environment": "calculator"},
        "eval": {"prompts": 0},
    }
    config = RunConfig.model_validate(values)
    tokenizer = PromptTokenizer.of_run(config, Path(config.model.path))
    assert tokenizer.template is not None
    environments = Environments(config.agent)
    no_engine: Any = cast(Any, None)  # none is asked
    model = PolicyModel(config, tokenizer, reply_format(tokenizer.template), no_engine)
    conversations = EnvironmentConversations(model, environments)
    try:
        with pytest.raises(BadPrompt, match=r"there are tools \(calculator\), but the chat template has no form"):
            await conversations.hold("s", Example("1 + 1", "2"), [1], 0, 0)
    finally:
        await environments.close()


@pytest.mark.parametrize(
    ("calls", "problem", "tools", "errors"),
    [
        (("add", "add"), "", ["add"], 0),
        (("add", "sub"), "", ["add"], 1),
        (("add",), "a tool call has no name", ["add"], 1),
        ((), "", ["add"], 0),
        (("sub",), "", [], 0),  # the environment reads calls by itself
    ],
)
def test_calls_that_come_to_nothing_are_counted(
    calls: tuple[str, ...], problem: str, tools: list[str], errors: int
) -> None:
    conversation = Conversation()
    conversation.count_calls(ParsedReply(calls=tuple(map(ToolCall, calls)), problem=problem), tools)
    assert (conversation.tool_calls, conversation.tool_errors) == (len(calls), errors)
