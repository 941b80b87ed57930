"""After which steps a checkpoint is due."""

import pytest

from relaxd.config.trainer import CheckpointConfig
from services.trainer.loop.checkpoint_control import Schedule


@pytest.mark.parametrize(
    ("settings", "seconds", "size", "due"),
    [
        ({"every": 4, "replay_seconds": 0, "replay_bytes": 0}, 1e6, 10**15, [4, 8, 12]),
        ({"every": 50, "replay_seconds": 25, "replay_bytes": 0}, 10.0, 10**15, [3, 6, 9, 12]),
        ({"every": 50, "replay_seconds": 0, "replay_bytes": 1000}, 1e6, 300, [4, 8, 12]),
        ({"every": 5, "replay_seconds": 30, "replay_bytes": 10**9}, 10.0, 300, [3, 5, 8, 10]),
        ({"every": 50, "replay_seconds": 5, "replay_bytes": 10}, 10.0, 300, list(range(1, 13))),
        ({"every": 0, "replay_seconds": 5, "replay_bytes": 10}, 10.0, 300, []),
        ({}, 1.0, 2 * 10**9, []),
        ({}, 300.0, 10**6, [6, 12]),
    ],
)
def test_checkpoints_are_due_by_steps_work_and_files(
    settings: dict[str, int], seconds: float, size: int, due: list[int]
) -> None:
    schedule = Schedule(CheckpointConfig.model_validate(settings))
    found = []
    for step in range(1, 13):
        schedule.count(seconds=seconds, size=size)
        if schedule.due(step):
            found.append(step)
            schedule.begun()
    assert found == due


def test_one_that_has_not_begun_stays_due() -> None:
    schedule = Schedule(CheckpointConfig(every=50, replay_seconds=20.0))
    schedule.count(seconds=20.0, size=0)
    assert schedule.due(1)
    assert schedule.due(2)
    schedule.begun()
    assert not schedule.due(3)
