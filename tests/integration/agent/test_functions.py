"""Conversations that functions lead: a real host and real requests, with a scripted engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.environment import BadEnvironmentError
from relaxd.envs.own_function import load_function
from relaxd.envs.replies import reply_format
from services.agent.conversation import Conversation, ConversationStart
from services.agent.endpoint import Endpoint
from services.agent.engines import EngineSession, OutOfTime
from services.agent.environments import Environments
from services.agent.function_conversations import FunctionConversations
from services.agent.model_turns import PolicyModel
from tests.integration.agent.scripted_engines import STOP, Fleet, encode
from tests.integration.agent.test_programs import CALLS, EXAMPLE, config_of, tokenizer
from tests.kit.waiting import eventually

__all__ = ["tokenizer"]
OWN = "tests.integration.agent.functions:"


def config_with(function: str, **agent: Any) -> RunConfig:
    return config_of((), function=function if ":" in function else OWN + function, **agent)


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
    config, told = config_with(function, **agent), list[str]()
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


async def test_a_function_is_trained_on_the_engines_tokens(tokenizer: PromptTokenizer) -> None:
    fleet = Fleet([CALLS, "They are 5 and 9."], versions=[3])
    async with holding(tokenizer, fleet, "use_tools", settings={"paid": 0.5}) as held:
        result = await held.hold()
        assert held.told == ["adding"]
    assert result.failure == ""
    assert (result.finish, result.turns, result.reward) == ("env_done", 2, 0.5)
    assert result.info == {"calls": 2.0, "seed": 7.0}
    first, second = ([*encode(text), STOP] for text in (CALLS, "They are 5 and 9."))
    before, again = (list(request.prompt_tokens) for request in fleet.requests)
    observed = again[len(before) + len(first) :]
    parts = [(before, 0), (first, 1), (observed, 0), (second, 1)]
    (own,) = result.sequences.values()
    assert own.tokens.tolist() == [token for part, _ in parts for token in part]
    assert own.loss_mask.tolist() == [mask for part, mask in parts for _ in part]
    assert [message["role"] for message in result.messages] == ["assistant", "tool", "tool", "assistant"]


FAILURES = {
    "silent": "the function ended, but never asked the model",
    "raise": "RuntimeError: no luck (functions.py:",
    "text": "step() returned the reward 'good' (str): it must be a finite number",
    "refused": "ValueError: messages end with the assistant",
    "talk": "",
}


async def test_functions_end(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with holding(tokenizer, Fleet(["5 and 9"], versions=[3]), "misbehave", max_turns=1) as held:
        for what, failure in FAILURES.items():
            result = await held.hold(what=what)
            assert failure in result.failure, what
            assert bool(result.failure) == bool(failure)
            assert result.finish == ("env_failed" if failure else "turns")
        for what in ("block", "wait"):
            example = Example(EXAMPLE.prompt, "", {"what": what, "mark": str(mark)})
            begun = ConversationStart(EngineSession(what), example, 7, 8, lambda: float(not mark.exists()))
            result = Conversation()
            with pytest.raises(OutOfTime):
                await held.conversations._converse(result, begun)
            held.conversations._end(what)
            assert result.turns == 1  # which is kept
            if what == "wait":
                await eventually(lambda: not mark.exists(), "the end of the function")
            mark.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "has no nothing"),
        ("not_async", "must be async: async def not_async(sample, model)"),
        ("without_a_model", "can't be called with (sample, model) and {}: too many positional arguments; it is"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(name: str, problem: str) -> None:
    with pytest.raises(BadEnvironmentError, match=f'function "{OWN}{name}"') as caught:
        load_function(OWN + name, {})
    assert problem in str(caught.value)
