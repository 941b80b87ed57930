"""Conversations of the agent service that can't begin."""

from pathlib import Path
from typing import Any, cast

import pytest

from relaxd.config import RunConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.replies import reply_format
from services.agent.conversation import BadPrompt, Conversations
from services.agent.environments import Environments
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
    conversations = Conversations(config, tokenizer, reply_format(tokenizer.template), no_engine, environments)
    try:
        with pytest.raises(BadPrompt, match=r"there are tools \(calculator\), but the chat template has no form"):
            await conversations.hold("s", Example("1 + 1", "2"), [1], 0, 0)
    finally:
        await environments.close()
