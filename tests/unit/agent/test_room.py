"""The number of groups that an agent replica holds."""

import asyncio
from typing import Any, cast

import pytest

from relaxd.config import RunConfig
from services.agent.group_conversations import GroupConversations

NONE: Any = cast(Any, None)  # is not asked


@pytest.mark.parametrize(
    ("held", "others", "room"),
    [(0, 0, 3), (1, 0, 3), (2, 0, 3), (3, 0, 3), (1, 4, 1), (1, 5, 1), (0, 9, 1), (1, 1, 2), (1, 2, 2)],
)
async def test_another_group_is_held_as_soon_as_there_is_room_for_a_sample(held: int, others: int, room: int) -> None:
    values = {
        "run": {"steps": 1},
        "model": {"path": "m"},
        "data": {"source": "addition"},
        "reward": {"name": "environment"},
        "rollout": {"samples_per_prompt": 2},
        "agent": {"environment": "calculator", "max_sessions": 5},
    }
    groups = GroupConversations(RunConfig.model_validate(values), NONE, NONE, NONE, asyncio.Semaphore(5), NONE)
    assert groups.room(held, others) == room
