"""Prompts that can't be published fail their run, with the place and the reason, and nothing else."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.data.curriculum.curriculum import Curriculum
from relaxd.data.dataset import PromptDataset, RunData, load_data
from relaxd.data.examples import Example
from services.coordinator.runs.publisher import Publisher
from tests.integration.coordinator.fleet_kit import FleetKit
from tests.kit.models import make_tiny_model
from tests.kit.waiting import eventually


class Rows:
    """Prompts of which the third is not what the checks have seen."""

    def __init__(self, third: Callable[[], Example]) -> None:
        self._third = third

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Example:
        return self._third() if index == 2 else Example(f"{index} + 1?", str(index + 1))


def broken() -> Example:
    raise RuntimeError("the source is gone")


def with_bytes() -> Example:
    return Example("2 + 1?", "3", {"image": b"\x89PNG"})


@pytest.mark.parametrize(("third", "reason"), [(broken, "RuntimeError: the source is gone"), (with_bytes, "bytes")])
async def test_a_prompt_that_cannot_be_published_fails_the_run(
    redis_url: str, tmp_path: Path, third: Callable[[], Example], reason: str
) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": str(make_tiny_model(tmp_path / "tiny"))},
            "data": {"source": "addition", "shuffle": False},
            "reward": {"name": "addition"},
        }
    )
    kit = FleetKit(redis_url)
    try:
        context, data = kit.context(config), load_data(config)
        rows: Any = Rows(third)
        train = PromptDataset(rows, data.tokenizer, shuffle=False, seed=0)
        run_data = RunData(train, {}, 0, data.tokenizer)
        await context.board.create(term=context.term, groups_per_step=8, steps=9)
        visits = Curriculum(config, train).visits
        publisher = Publisher(context, run_data, visits, oldest_version=lambda: 0, wanted=lambda: True)
        task = asyncio.create_task(publisher.run_forever())
        await eventually(lambda: publisher.failure or task.done(), "the failure")
        assert not task.done(), "an error here would end the coordinator"
        task.cancel()
        assert reason in publisher.failure
        assert "the prompts" in publisher.failure
        assert "place (0, " in publisher.failure
    finally:
        await kit.close()
