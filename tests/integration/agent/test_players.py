"""Conversations in which the model plays two players: a real environment, with a scripted engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from services.agent.group_conversations import columns_of
from tests.integration.agent.conversation_kit import config_of, talks
from tests.integration.agent.scripted_engines import STOP, Fleet, encode
from tests.kit.models import byte_tokenizer

ASKED = Example([{"role": "user", "content": "Nim."}], "", {"stones": 7})
SELF = {"settings": {"opponent": "self"}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return PromptTokenizer(tmp_path / "model")


async def test_each_player_has_its_view_and_its_reward(tokenizer: PromptTokenizer) -> None:
    config = config_of("nim", players=2, credit="sequence", **SELF)
    fleet = Fleet(["3", "2", "2"], versions=[3])
    async with fleet.serving() as engines, talks(config, tokenizer, engines) as conversations:
        result = await conversations.hold("s", ASKED, [], 7, 8)
    assert (result.failure, result.finish, result.turns) == ("", "env_done", 3)
    assert result.player_rewards == {0: 1.0, 1: 0.0}
    prompts = [list(request.prompt_tokens) for request in fleet.requests]
    texts = [byte_tokenizer().decode(prompt) for prompt in prompts]
    assert "7 stones. Take 1 to 3." in texts[0]
    assert "4 stones. Take 1 to 3." in texts[1]
    assert "7 stones" not in texts[1]
    replies = [[*encode(text), STOP] for text in ("3", "2", "2")]
    observed = prompts[2][len(prompts[0] + replies[0]) :]
    assert byte_tokenizer().decode(observed).count("2 stones. Take 1 to 2.") == 1

    lost = replace(result, failure="it broke", sequences=result.sequences.copy())
    columns = columns_of([result, lost], masked=False, credit="sequence")
    views = [prompts[0] + replies[0] + observed + replies[2], prompts[1] + replies[1]]
    assert columns["tokens"].tolist() == [token for view in views * 2 for token in view]
    masks = [[0] * len(prompts[0]) + [1] * 2 + [0] * len(observed) + [1] * 2, [0] * len(prompts[1]) + [1] * 2]
    assert columns["loss_mask"].tolist() == [mask for view in masks * 2 for mask in view]
    assert columns["sample_of_sequence"].tolist() == [0, 0, 1, 1]
    assert columns["player"].tolist() == [0, 1, 0, 1]
    assert columns["sequence_reward"].tolist() == [1.0, 0.0, 0.0, 0.0]  # a failed conversation pays nothing
    lengths = [[len(prompts[0]) + 2, len(observed) + 2], [len(prompts[1]) + 2]]
    assert columns_of([result, lost], masked=False, credit="step")["message_returns"] == [
        *([[lengths[0][0], 1.0], [lengths[0][1], 1.0]], [[lengths[1][0], 0.0]]),
        *([[length, 0.0] for length in own] for own in lengths),
    ]


async def test_a_player_that_the_run_does_not_have_fails_the_conversation(tokenizer: PromptTokenizer) -> None:
    fleet = Fleet(["3"], versions=[3])
    async with fleet.serving() as engines, talks(config_of("nim", **SELF), tokenizer, engines) as conversations:
        result = await conversations.hold("s", ASKED, [], 7, 8)
    assert result.failure == "player 1 is to speak next, but agent.players is 1: set it to more"


@pytest.mark.parametrize("opponent", ["best", "random"])
async def test_a_fixed_opponent_is_the_environments(
    tokenizer: PromptTokenizer,
    opponent: str,
) -> None:
    fleet = Fleet(["3"] * 7, versions=[3])
    config = config_of("nim", settings={"opponent": opponent})
    async with fleet.serving() as engines, talks(config, tokenizer, engines) as conversations:
        result = await conversations.hold("s", replace(ASKED, metadata={"stones": 8}), [], 7, 8)
    assert (result.failure, result.finish) == ("", "env_done")
    assert list(result.sequences) == [0]
    assert result.reward == 0.0 or opponent == "random"
