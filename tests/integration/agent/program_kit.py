"""Conversations of a program with a scripted engine, for tests: real processes and requests."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.replies import reply_format
from services.agent.conversation import Conversation, ConversationStart
from services.agent.engines import EngineSession
from services.agent.model_turns import PolicyModel
from services.agent.program_conversations import ProgramConversations, Programs
from tests.integration.agent.scripted_engines import STOP, Fleet, encode
from tests.kit.models import byte_tokenizer

PROGRAMS = str(Path(__file__).with_name("programs.py"))
EXAMPLE = Example([{"role": "user", "content": "2 + 3 and 4 + 5?"}], "5 and 9", {"level": 1})
CALLS = "First both." + "".join(
    f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b":  {a + 1}}}}}\n</tool_call>' for a in (2, 4)
)
TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    return PromptTokenizer(folder, TEMPLATE)


def config_of(command: Sequence[str], **agent: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "none"},
            "data": {"source": "addition", "max_prompt_tokens": 1000},
            "rollout": {"max_new_tokens": 2000},
            "reward": {"name": "environment"},
            "agent": {"command": tuple(command), **agent},
            "eval": {"prompts": 0},
        }
    )


@dataclass
class Held:
    """Conversations of a program, and the model that it asks."""

    conversations: ProgramConversations
    programs: Programs
    model: PolicyModel

    async def hold(self, example: Example = EXAMPLE) -> Conversation:
        published = self.model.tokenizer.encode([example])[0].tolist()
        return await self.conversations.hold("s", example, published, 7, 8)

    def start(self, seconds: Callable[[], float], **metadata: Any) -> ConversationStart:
        example = Example(EXAMPLE.prompt, "", metadata)
        return ConversationStart(EngineSession("s"), example, 7, 8, seconds)


@asynccontextmanager
async def holding(
    tokenizer: PromptTokenizer,
    fleet: Fleet,
    what: str,
    *,
    program: Sequence[str] = (sys.executable, PROGRAMS),
    **agent: Any,
) -> AsyncIterator[Held]:
    assert tokenizer.template is not None
    config = config_of([*program, what], **agent)
    programs = Programs(config.agent)
    await programs.start()
    try:
        async with fleet.serving() as engines:
            model = PolicyModel(config, tokenizer, reply_format(tokenizer.template), engines)
            yield Held(ProgramConversations(model, programs), programs, model)
    finally:
        await programs.close()


SUMS = "They are 5 and 9."


def check_tokens(fleet: Fleet, texts: Sequence[str], result: Conversation) -> list[list[int]]:
    """Compare a conversation's tokens with the engine's; return those of the messages before each text."""
    tokens: list[int] = []
    mask: list[int] = []
    added: list[list[int]] = []
    for request, text in zip(fleet.requests, texts, strict=True):
        prompt, reply = list(request.prompt_tokens), [*encode(text), STOP]
        assert prompt[: len(tokens)] == tokens
        added.append(prompt[len(tokens) :])
        tokens += added[-1] + reply
        mask += [0] * len(added[-1]) + [1] * len(reply)
    (own,) = result.sequences.values()
    assert not own.shares_prompt  # the program's tools are in its own
    assert own.tokens.tolist() == tokens
    assert own.loss_mask.tolist() == mask
    assert own.logprobs.tolist() == [-float(token) * by for token, by in zip(tokens, mask, strict=True)]
    return added
