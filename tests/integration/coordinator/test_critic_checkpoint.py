"""The checkpoint of a critic service is waited for, while the critic dies and comes back; see test_critic_patience."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.roles import CRITIC, TRAINER
from relaxd.rpc.errors import Unavailable
from relaxd.v1 import trainer_pb2, trainer_pb2_grpc
from relaxd.v1.coordinator_pb2 import Registration, SaveCheckpointRequest
from relaxd.v1.replica_pb2 import WeightVersion
from relaxd.waiting import waits
from services.coordinator.api.server import CoordinatorService
from services.coordinator.fleet.checkpoints import NoCriticCheckpoint, await_critic
from tests.integration.coordinator.fleet_kit import FleetKit
from tests.kit.waiting import eventually


def config_of(placement: str, role_timeout_seconds: float = 60.0) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": "model"},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
            "rollout": {"samples_per_prompt": 1},
            "algorithm": {"name": "ppo", "old_logprobs": "current"},
            "roles": {"critic": {"placement": placement}},
            "health": {"role_timeout_seconds": role_timeout_seconds},
        }
    )


@pytest.fixture
async def kit(redis_url: str) -> AsyncIterator[FleetKit]:
    kit = FleetKit(redis_url)
    yield kit
    await kit.close()


async def join(kit: FleetKit, name: str) -> None:
    await kit.registry.register(Registration(replica_id=name, role=CRITIC, address="127.0.0.1:1", protocol_version=1))
    kit.beat(name)


def take(folder: Path, name: str, *, kept: bool = False) -> None:
    path = folder / "critic" / "checkpoints" / name
    path.mkdir(parents=True)
    if kept:
        (path / "kept").touch()


def described() -> list[str]:
    return [str(wait) for wait in waits() if "checkpoint of step" in wait.reason]


async def test_a_critic_that_restarts_is_waited_for_by_name(kit: FleetKit, tmp_path: Path) -> None:
    context = kit.context(config_of("service"))
    await join(kit, "critic-1")
    awaiting = asyncio.create_task(await_critic(context, tmp_path, 5))
    kit.beat("critic-1", detail="training on step 4")
    await eventually(lambda: described() == ["the critic's checkpoint of step 5: training on step 4 (critic-1)"])
    await kit.lose("critic-1")
    await eventually(lambda: described() == ["the critic's checkpoint of step 5: it isn't there, and is expected back"])
    await join(kit, "critic-1-r1")
    await eventually(lambda: described() == ["the critic's checkpoint of step 5 (critic-1-r1)"])
    for other in ("step-000004", "step-000005.broken"):
        take(tmp_path, other)
    await asyncio.wait({awaiting}, timeout=0.5)
    assert not awaiting.done()
    take(tmp_path, "step-000005")
    await asyncio.wait_for(awaiting, 60)
    assert described() == []


async def test_one_that_is_to_stay_is_waited_for(kit: FleetKit, tmp_path: Path) -> None:
    context = kit.context(config_of("service"))
    await join(kit, "critic-1")
    take(tmp_path, "step-000005")
    awaiting = asyncio.create_task(await_critic(context, tmp_path, 5, kept=True))
    await asyncio.wait({awaiting}, timeout=0.5)
    assert not awaiting.done()
    take(tmp_path, "step-000006", kept=True)
    await asyncio.wait_for(awaiting, 60)


async def test_without_a_critic_it_gives_up_in_the_end_or_has_nothing_to_wait_for(
    kit: FleetKit, tmp_path: Path
) -> None:
    said = "there is no checkpoint of the critic of step 5: no critic has been there for [0-9] s"
    with pytest.raises(NoCriticCheckpoint, match=said):
        await await_critic(kit.context(config_of("service", 0.2)), tmp_path, 5)
    await await_critic(kit.context(config_of("trainer")), tmp_path, 5)


class Trainer(trainer_pb2_grpc.TrainerServicer):
    """Has a checkpoint of step 5."""

    async def SaveCheckpoint(self, request: trainer_pb2.TrainerSaveCheckpointRequest, context: Any) -> Any:
        return trainer_pb2.TrainerSaveCheckpointResponse(
            path="/runs/run/checkpoints/step-000005", weights=WeightVersion(term=1, version=5)
        )


async def test_the_call_answers_once_both_are_there_and_says_which_one_is(kit: FleetKit, tmp_path: Path) -> None:
    add = trainer_pb2_grpc.add_TrainerServicer_to_server
    await kit.serve("trainer-1", TRAINER, add, Trainer(), "relaxd.v1.Trainer")
    active: Any = SimpleNamespace(
        context=kit.context(config_of("service", 0.2)),
        record=SimpleNamespace(folder=tmp_path),
        trainer_awake=nullcontext,
    )
    manager: Any = SimpleNamespace(require_active=lambda run_id: active)
    service = CoordinatorService(manager, kit.registry, None, kit.peers, None, None)  # type: ignore[arg-type]
    with pytest.raises(
        Unavailable, match=r"of step 5: no critic .* trainer is on the disk: /runs/run/checkpoints/step"
    ):
        await service.SaveCheckpoint(SaveCheckpointRequest(run_id="run"), None)
    take(tmp_path, "step-000005")
    with pytest.raises(Unavailable):  # it may be removed in its turn
        await service.SaveCheckpoint(SaveCheckpointRequest(run_id="run"), None)
    rotating = await service.SaveCheckpoint(SaveCheckpointRequest(run_id="run", rotate=True), None)
    assert rotating.path == "/runs/run/checkpoints/step-000005"
    (tmp_path / "critic" / "checkpoints" / "step-000005" / "kept").touch()
    kept = await service.SaveCheckpoint(SaveCheckpointRequest(run_id="run"), None)
    assert kept.weights.version == 5
