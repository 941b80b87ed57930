"""Failed weight synchronisations count against a trainer or an engine until one succeeds."""

import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from relaxd.config import RunConfig
from relaxd.roles import ROLLOUT, TRAINER
from relaxd.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from services.coordinator.state.records import Announcement, RoleFailure, WeightsRecord
from services.coordinator.weights.weight_sync import QUIET_FAILURES, WeightSync
from services.trainer.loop.weight_read_lock import WeightReadLock
from tests.integration.coordinator.fleet_kit import RUN, FleetKit

CONFIG = RunConfig.model_validate(
    {
        "run": {"steps": 9},
        "model": {"path": "model"},
        "data": {"source": "addition"},
        "reward": {"name": "addition"},
        "weights": {"verify": "never"},
    }
)


class Trainer(trainer_pb2_grpc.TrainerServicer):
    """Sends nothing, and fails the first broadcasts as a trainer that is restarting does."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def GetWeightManifest(self, request, context):
        return trainer_pb2.GetWeightManifestResponse(source_ranks=1, store_host="127.0.0.1", store_port=1)

    async def JoinWeightGroup(self, request, context):
        return trainer_pb2.TrainerJoinWeightGroupResponse()

    async def BroadcastWeights(self, request, context):
        if self.failures:
            self.failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the ranks are starting")
        return trainer_pb2.BroadcastWeightsResponse()

    async def LeaveWeightGroup(self, request, context):
        return trainer_pb2.TrainerLeaveWeightGroupResponse()


class Engine(rollout_pb2_grpc.RolloutServicer):
    """Receives nothing, always."""

    async def JoinWeightGroup(self, request, context):
        return rollout_pb2.JoinWeightGroupResponse()

    async def ReceiveWeights(self, request, context):
        return rollout_pb2.ReceiveWeightsResponse(seconds=0.001)

    async def ResumeGeneration(self, request, context):
        return rollout_pb2.ResumeGenerationResponse()

    async def LeaveWeightGroup(self, request, context):
        return rollout_pb2.LeaveWeightGroupResponse()


@pytest.fixture
async def kit(redis_url: str) -> AsyncIterator[FleetKit]:
    kit = FleetKit(redis_url)
    yield kit
    await kit.close()


async def test_a_success_forgets_the_failures_of_the_trainer(kit: FleetKit) -> None:
    """Else a trainer would stay suspect for ever after its restarts, and be restarted for them one day."""
    trainer = Trainer(failures=3)
    await kit.serve("trainer-0", TRAINER, trainer_pb2_grpc.add_TrainerServicer_to_server, trainer, "relaxd.v1.Trainer")
    await kit.serve("rollout-0", ROLLOUT, rollout_pb2_grpc.add_RolloutServicer_to_server, Engine(), "relaxd.v1.Rollout")
    sender, engine = kit.registry.get("trainer-0"), kit.registry.get("rollout-0")
    assert sender is not None
    assert engine is not None
    sync = WeightSync(kit.context(CONFIG), WeightsRecord())
    announced = Announcement(run_id=RUN, term=1, version=1, replica_id="trainer-0")

    async def then() -> None:
        return None

    counts = []
    for _ in range(4):
        await sync.synchronise(sender.member, [engine.member], announced, then)
        counts.append((sync.failures(sender), sync.last_failure == ""))
    assert counts == [(1, False), (2, False), (3, False), (0, True)]


class OtherModel(Engine):
    """Refuses the trainer's tensors, as an engine with another model does."""

    async def JoinWeightGroup(self, request, context):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "manifest: no lm_head.weight")


async def test_an_engine_that_refuses_the_tensors_is_not_asked_again(kit: FleetKit) -> None:
    """Its next process would refuse them, too. The others go on without it; with none left, nothing can."""
    trainer = Trainer(failures=0)
    await kit.serve("trainer-0", TRAINER, trainer_pb2_grpc.add_TrainerServicer_to_server, trainer, "relaxd.v1.Trainer")
    for name, service in (("rollout-0", OtherModel()), ("rollout-1", Engine())):
        await kit.serve(name, ROLLOUT, rollout_pb2_grpc.add_RolloutServicer_to_server, service, "relaxd.v1.Rollout")
    sender, refusing, other = map(kit.registry.get, ("trainer-0", "rollout-0", "rollout-1"))
    assert sender is not None
    assert refusing is not None
    assert other is not None
    sync = WeightSync(kit.context(CONFIG), WeightsRecord())
    announced = Announcement(run_id=RUN, term=1, version=1, replica_id="trainer-0")

    async def then() -> None:
        return None

    await sync.synchronise(sender.member, [refusing.member, other.member], announced, then)
    refusal = "INVALID_ARGUMENT: manifest: no lm_head.weight"
    assert [sync.refusal(one) for one in (sender, refusing, other)] == ["", refusal, ""]
    assert [sync.failures(one) for one in (sender, refusing, other)] == [0, 1, 0]
    assert sync.candidates() == [other]
    await sync.synchronise(sender.member, [other.member], announced, then)
    assert (sync.last_failure, sync.refusal(refusing), sync.failure()) == ("", refusal, None)
    kit.fleet.give_up(["rollout-1"])
    reason = f"no engine takes the trainer's weights: rollout-0 refuses them: {refusal}"
    assert sync.failure() == RoleFailure(ROLLOUT, "rollout-0", reason)


class FasterTrainer(Trainer):
    """Has version 2 when it is asked for version 1."""

    def __init__(self) -> None:
        super().__init__(failures=0)
        self.weights = WeightReadLock(term=1)
        self.weights.publish(2)

    async def BroadcastWeights(self, request, context):
        with self.weights.held(request.weights.term, request.weights.version, request.timeout_seconds):
            return trainer_pb2.BroadcastWeightsResponse()


async def test_a_trainer_that_is_faster_than_a_synchronisation_is_no_failure(
    kit: FleetKit, caplog: pytest.LogCaptureFixture
) -> None:
    """It announces the newer version in a moment. If it never does, that is a failure."""
    trainer = FasterTrainer()
    await kit.serve("trainer-0", TRAINER, trainer_pb2_grpc.add_TrainerServicer_to_server, trainer, "relaxd.v1.Trainer")
    await kit.serve("rollout-0", ROLLOUT, rollout_pb2_grpc.add_RolloutServicer_to_server, Engine(), "relaxd.v1.Rollout")
    sender, engine = map(kit.registry.get, ("trainer-0", "rollout-0"))
    assert sender is not None
    assert engine is not None
    sync = WeightSync(kit.context(CONFIG), WeightsRecord())

    async def then() -> None:
        return None

    async def synchronise(version: int) -> str:
        announced = Announcement(run_id=RUN, term=1, version=version, replica_id="trainer-0")
        await sync.synchronise(sender.member, [engine.member], announced, then)
        return sync.last_failure

    assert "the trainer has (1, 2)" in await synchronise(1)
    assert await synchronise(2) == ""
    assert [sync.failures(one) for one in (sender, engine)] == [0, 0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for _ in range(QUIET_FAILURES + 1):
        await synchronise(1)
    assert sync.failures(sender) == 1
    assert any("can't be sent" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
