"""Conversations of a function with a scripted engine, for tests: a real host and real requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.replies import reply_format
from services.agent.conversation import Conversation
from services.agent.endpoint import Endpoint
from services.agent.environments import Environments
from services.agent.model_turns import PolicyModel
from services.agent.program_conversations import FunctionConversations
from tests.integration.agent.program_kit import EXAMPLE, config_of
from tests.integration.agent.scripted_engines import Fleet

OWN = "tests.integration.agent.functions:"


@dataclass
class Held:
    """Conversations of a function, and what it told people."""

    conversations: FunctionConversations
    model: PolicyModel
    told: list[str] = field(default_factory=list)

    async def hold(self, **metadata: Any) -> Conversation:
        example = Example(EXAMPLE.prompt, EXAMPLE.answer, metadata)
        published = self.model.tokenizer.encode([example])[0].tolist()
        return await self.conversations.hold(str(metadata), example, published, 7, 8)


@asynccontextmanager
async def holding(tokenizer: PromptTokenizer, fleet: Fleet, function: str, **agent: Any) -> AsyncIterator[Held]:
    assert tokenizer.template is not None
    name = function if ":" in function else OWN + function
    config, told = config_of((), function=name, **agent), list[str]()
    functions, endpoint = Environments(config.agent, "agent.function", told.extend), Endpoint()
    try:
        await functions.start()
        await endpoint.start()
        async with fleet.serving() as engines:
            model = PolicyModel(config, tokenizer, reply_format(tokenizer.template), engines)
            yield Held(FunctionConversations(model, functions, endpoint), model, told)
    finally:
        await endpoint.close()
        await functions.close()
