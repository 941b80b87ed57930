"""The export at the end of a run: it has no time limit while the trainer is alive."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from relaxd.config import DataConfig, ModelConfig, RewardConfig, RunConfig, RunSection
from relaxd.roles import TRAINER
from relaxd.v1 import trainer_pb2, trainer_pb2_grpc
from relaxd.waiting import waits
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.runs import ending
from services.coordinator.runs.ending import ExportFailed, export_model
from tests.integration.coordinator.fleet_kit import FleetKit
from tests.kit.waiting import eventually

DAY = 86400.0


class Trainer(trainer_pb2_grpc.TrainerServicer):
    """Exports once the test allows it."""

    def __init__(self) -> None:
        self.asked = self.left = self.full = False
        self.written = asyncio.Event()

    async def ExportHuggingFace(self, request: trainer_pb2.ExportHuggingFaceRequest, context: Any) -> Any:
        self.asked = True
        assert context.time_remaining() > DAY
        if self.full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "model was not written: No space left on device")
        try:
            await self.written.wait()
        except asyncio.CancelledError:
            self.left = True
            raise
        return trainer_pb2.ExportHuggingFaceResponse(path=f"/runs/{request.folder}")


@pytest.fixture
async def kit(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FleetKit]:
    monkeypatch.setattr(ending, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(ending, "DISK_SECONDS", 0.1)
    kit = FleetKit(redis_url)
    yield kit
    await kit.close()


def context(kit: FleetKit, role_timeout_seconds: float) -> RunContext:
    config = RunConfig(
        run=RunSection(steps=9),
        model=ModelConfig(path="none"),
        data=DataConfig(source="addition"),
        reward=RewardConfig(name="addition"),
    )
    health = config.health.model_copy(update={"role_timeout_seconds": role_timeout_seconds})
    return kit.context(config.model_copy(update={"health": health}))


async def start(kit: FleetKit, name: str) -> Trainer:
    trainer = Trainer()
    add = trainer_pb2_grpc.add_TrainerServicer_to_server
    await kit.serve(name, TRAINER, add, trainer, "relaxd.v1.Trainer")
    return trainer


async def test_the_trainer_may_take_any_time_and_the_next_one_is_asked_when_it_is_lost(kit: FleetKit) -> None:
    lost = await start(kit, "lost")
    export = asyncio.create_task(export_model(context(kit, 30)))
    await eventually(lambda: lost.asked)
    await kit.lose("lost")
    await eventually(lambda: lost.left)
    following = await start(kit, "next")
    await eventually(lambda: following.asked)
    following.written.set()
    assert await export == "/runs/model"


async def test_it_waits_for_room_on_the_trainers_disk_and_says_so(kit: FleetKit) -> None:
    trainer = await start(kit, "trainer-0")
    trainer.full = True
    export = asyncio.create_task(export_model(context(kit, 30)))
    await eventually(lambda: any(wait.disk for wait in waits()))
    (wait,) = [wait for wait in waits() if wait.disk]
    assert str(wait) == (
        "trainer-0's disk, to write the run's last files: model was not written: No space left on device"
    )
    trainer.written.set()
    trainer.full = False
    assert await export == "/runs/model"
    assert not [wait for wait in waits() if wait.disk]


async def test_without_a_trainer_it_gives_up_in_the_end(kit: FleetKit) -> None:
    with pytest.raises(ExportFailed, match="no trainer is registered"):
        await export_model(context(kit, 0.3))
