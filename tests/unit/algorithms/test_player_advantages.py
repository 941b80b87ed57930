"""Advantages of conversations in which each player has its own reward."""

from typing import Any

import numpy as np
import pytest

from relaxd.algorithms import Advantages, Filtered, create
from relaxd.board import DropReason, stages_for
from relaxd.config import RunConfig
from services.advantage.players import advantages_by_player

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
    found = advantages_by_player(create(config_of().algorithm), columns_of(REWARDS))
    assert isinstance(found, Advantages)
    deviation = np.std([1.0, 0.0, 1.0], ddof=1)
    won, lost = (1 / 3) / deviation, (-2 / 3) / deviation  # player 0's; player 1's are the opposite
    expected = [(won, 2), (-won, 5), (lost, 3), (-lost, 1), (won, 4), (-won, 2)]
    assert found.values == pytest.approx(np.repeat(*zip(*expected, strict=True)), rel=1e-4)


def test_a_player_whose_rewards_are_equal_has_no_advantage() -> None:
    algorithm = create(config_of(mask_truncated=True).algorithm)
    found = advantages_by_player(algorithm, columns_of(REWARDS | {1: (1.0, 1.0, 1.0)}))
    assert isinstance(found, Advantages)
    of_sequence = np.split(found.values, np.cumsum([2, 5, 3, 1, 4])[:5])
    assert [bool(values.any()) for values in of_sequence] == [True, False, False, False, True, False]  # one was cut off
    found = advantages_by_player(algorithm, columns_of({0: (1.0,) * 3, 1: (0.0,) * 3}))
    assert found == Filtered(DropReason.ZERO_VARIANCE)


def test_runs_have_the_players_columns_where_each_has_its_reward() -> None:
    stages = {stage.name: stage for stage in stages_for(config_of())}
    assert {"player", "sequence_reward"} <= {*stages["rollout"].writes}
    assert {"player", "sequence_reward"} <= {*stages["advantage"].needs}
    with pytest.raises(ValueError, match=r'agent.credit is "sequence", but its advantages come from the trainer'):
        stages_for(config_of("ppo"))
