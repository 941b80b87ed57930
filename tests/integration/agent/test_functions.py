"""Conversations that functions lead: a real host and real requests, with a scripted engine."""

from pathlib import Path

import pytest

from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.environment import BadEnvironmentError
from relaxd.envs.own_function import load_function
from services.agent.conversation import Conversation, ConversationStart
from services.agent.engines import EngineSession, OutOfTime
from tests.integration.agent.function_kit import OWN, holding
from tests.integration.agent.program_kit import CALLS, EXAMPLE, tokenizer
from tests.integration.agent.scripted_engines import STOP, Fleet, encode
from tests.kit.waiting import eventually

__all__ = ["tokenizer"]


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
