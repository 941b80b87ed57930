"""Advantages of conversations in which each player, or each message, has its own reward."""

from typing import Any

import numpy as np
import pytest

from relaxd.algorithms import Advantages, Filtered, create
from relaxd.board import DropReason, stages_for
from relaxd.config import RunConfig
from services.advantage.service import advantages_by_part
from services.agent.conversation import Conversation, ConversationTokens
from services.agent.group_conversations import columns_of as conversation_columns

REWARDS = {0: (1.0, 0.0, 1.0), 1: (0.0, 1.0, 0.0)}
LENGTHS = {0: (2, 3, 4), 1: (5, 1, 2)}


def columns_of(rewards: dict[int, tuple[float, ...]]) -> dict[str, Any]:
    """Return the columns of three samples of two players, whose sequences are neighbours."""
    order = [(sample, player) for sample in range(3) for player in (0, 1)]
    return {
        "player": np.array([player for _, player in order], np.int32),
        "sequence_reward": np.array([rewards[player][sample] for sample, player in order]),
        "lengths": np.array([LENGTHS[player][sample] for sample, player in order], np.int32),
        "sample_of_sequence": np.array([sample for sample, _ in order], np.int32),
        "finish": ["env_done", "env_done", "budget", "budget", "env_done", "env_done"],
    }


def config_of(name: str = "grpo", **algorithm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "m"},
            "data": {"source": "addition"},
            "reward": {"name": "environment"},
            "agent": {"environment": "nim", "players": 2, "credit": "sequence"},
            "algorithm": {"name": name, **algorithm},
        }
    )


def test_each_player_is_compared_with_the_same_player() -> None:
    found = advantages_by_part(create(config_of().algorithm), columns_of(REWARDS))
    assert isinstance(found, Advantages)
    deviation = np.std([1.0, 0.0, 1.0], ddof=1)
    won, lost = (1 / 3) / deviation, (-2 / 3) / deviation  # player 0's; player 1's are the opposite
    expected = [(won, 2), (-won, 5), (lost, 3), (-lost, 1), (won, 4), (-won, 2)]
    assert found.values == pytest.approx(np.repeat(*zip(*expected, strict=True)), rel=1e-4)


def test_a_player_whose_rewards_are_equal_has_no_advantage() -> None:
    algorithm = create(config_of(mask_truncated=True).algorithm)
    found = advantages_by_part(algorithm, columns_of(REWARDS | {1: (1.0, 1.0, 1.0)}))
    assert isinstance(found, Advantages)
    of_sequence = np.split(found.values, np.cumsum([2, 5, 3, 1, 4])[:5])
    assert [bool(values.any()) for values in of_sequence] == [True, False, False, False, True, False]  # one was cut off
    found = advantages_by_part(algorithm, columns_of({0: (1.0,) * 3, 1: (0.0,) * 3}))
    assert found == Filtered(DropReason.ZERO_VARIANCE)


def conversation(lengths: list[int], *steps: tuple[int, dict[int, float]], failure: str = "") -> Conversation:
    """Return a conversation of player 0 with messages of these lengths, answered with rewards of players."""
    tokens = np.arange(sum(lengths), dtype=np.int32)
    sequence = ConversationTokens(
        tokens=tokens,
        loss_mask=np.ones(len(tokens), np.uint8),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int64),
        message_lengths=lengths,
    )
    made = Conversation(sequences={0: sequence}, finish="env_done", failure=failure)
    for speaker, rewards in steps:
        made.add_rewards(speaker, rewards)
    return made


def normalised(*returns: float) -> list[float]:
    """Return (G - mean) / (std + 1e-6) in float64, with the divisor n - 1."""
    values = np.array(returns, np.float64)
    return ((values - values.mean()) / (values.std(ddof=1) + 1e-6)).tolist()


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        (  # messages of the same number are compared by what followed them; the only third one by nothing
            ([1.0, 0.0, 2.0], [0.0, 1.0], [0.5]),
            list(zip(normalised(3.0, 1.0, 0.5), [*normalised(2.0, 1.0), 0.0], [0.0] * 3, strict=True)),
        ),
        (  # what was won before a message doesn't count for it
            ([5.0, 0.0], [0.0, 1.0], [0.0, 0.0]),
            list(zip(normalised(5.0, 1.0, 0.0), normalised(0.0, 1.0, 0.0), [0.0] * 3, strict=True)),
        ),
        (  # a reward at the end is the credit of all messages, as that of samples
            ([0.0, 1.0], [0.0, 0.0], [0.0, 1.0]),
            list(zip(normalised(1.0, 0.0, 1.0), normalised(1.0, 0.0, 1.0), [0.0] * 3, strict=True)),
        ),
    ],
)
def test_each_message_has_the_rewards_after_it(
    rewards: tuple[list[float], ...], advantages: list[tuple[float, ...]]
) -> None:
    conversations = [
        conversation([2 + place, 3, 1][: len(own)], *((0, {0: reward}) for reward in own))
        for place, own in enumerate(rewards)
    ]
    columns = conversation_columns(conversations, masked=False, credit="step")
    found = advantages_by_part(create(config_of().algorithm), columns)
    assert isinstance(found, Advantages)
    lengths = [one.sequences[0].message_lengths for one in conversations]
    expected = [
        value
        for own, of_messages in zip(lengths, advantages, strict=True)
        for length, value in zip(own, of_messages, strict=False)
        for _ in range(length)
    ]
    assert found.values == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_rewards_of_other_players_and_of_failed_conversations_do_not_count() -> None:
    kept = conversation([1, 2], (0, {0: 1.0, 1: 7.0}), (1, {0: 0.25, 1: 3.0}), (0, {0: 0.5}))
    lost = conversation([4], (0, {0: 9.0}), failure="it broke")
    columns = conversation_columns([kept, lost], masked=False, credit="step")
    assert columns["message_returns"] == [[[1, 1.75], [2, 0.5]], [[4, 0.0]]]
    assert columns["player"].tolist() == [0, 0]
    assert "sequence_reward" not in columns


def test_runs_have_the_players_columns_where_each_has_its_reward() -> None:
    stages = {stage.name: stage for stage in stages_for(config_of())}
    assert {"player", "sequence_reward"} <= {*stages["rollout"].writes}
    assert {"player", "sequence_reward"} <= {*stages["advantage"].needs}
    config = config_of()
    by_step = config.model_copy(update={"agent": config.agent.model_copy(update={"credit": "step"})})
    stages = {stage.name: stage for stage in stages_for(by_step)}
    assert {"player", "message_returns"} <= {*stages["rollout"].writes} & {*stages["advantage"].needs}
    assert not {"sequence_reward", "message_returns"} & {*stages["train"].needs}
    with pytest.raises(ValueError, match=r'agent.credit is "sequence", but its advantages come from the trainer'):
        stages_for(config_of("ppo"))
