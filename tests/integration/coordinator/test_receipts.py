"""Engines whose memory isn't what was sent: real models and broadcasts, as the coordinator synchronises them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from relaxd.board import Fenced
from relaxd.config import RunConfig
from relaxd.data.curriculum.run_curriculum import Curriculum
from relaxd.data.dataset import load_data
from relaxd.roles import ROLLOUT, TRAINER
from relaxd.run_folder import WEIGHTS, read_lines
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from relaxd.weights.buckets import TensorSpec, checksum, from_proto, pack, plan_buckets, to_proto
from relaxd.weights.receipts import Receipt, digest_of
from relaxd.weights.weight_group import Rendezvous, WeightGroup, host_store
from services.coordinator.runs.alarms import weight_problems
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.runs.step_recorder import StepRecorder
from services.coordinator.state.records import Announcement, WeightsRecord
from services.coordinator.state.retries import FolderRetry, RedisRetry
from services.coordinator.weights.weight_sync import WeightSync
from services.rollout.engines.request_types import EngineError, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.engines.transformers.transformers_process import WeightReceiver
from services.trainer.loop.training_queue import ReceiptCheck
from tests.integration.coordinator.fleet_kit import RUN, FleetKit
from tests.integration.trainer.service_kit import train_group
from tests.kit.models import make_tiny_model
from tests.kit.waiting import eventually

FAULTS = {"swapped": 2, "frozen": 9, "old": 20}
"""Kinds of faults, and the number of tensors that are wrong."""


def config_with(verify: str, model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": str(model)},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
            "weights": {"verify": verify},
        }
    )


class Trainer(trainer_pb2_grpc.TrainerServicer):
    """Broadcasts the tensors of the version that is asked for."""

    def __init__(self, folder: Path) -> None:
        self._store = host_store()
        model = AutoModelForCausalLM.from_pretrained(folder)
        self._shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
        specs = [TensorSpec(name, torch.float32, tuple(shape)) for name, shape in self._shapes.items()]
        self._buckets = plan_buckets(specs, 20_000, source_rank=0)
        self._group: WeightGroup | None = None
        self.dies = False
        """True if the trainer dies once it has sent everything."""
        self.seed = 0
        """Another trainer makes other weights of each version."""

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version + self.seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in self._shapes.items()}

    def checksums(self, version: int) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self.tensors(version).items()}

    async def GetWeightManifest(self, request: Any, context: Any) -> trainer_pb2.GetWeightManifestResponse:
        place = {"store_host": "127.0.0.1", "store_port": self._store.port}
        return trainer_pb2.GetWeightManifestResponse(manifest=to_proto(self._buckets), source_ranks=1, **place)

    async def JoinWeightGroup(self, request: Any, context: Any) -> trainer_pb2.TrainerJoinWeightGroupResponse:
        self._group = WeightGroup(Rendezvous.from_proto(request.group), 0)
        await asyncio.to_thread(self._group.connect, 20)
        return trainer_pb2.TrainerJoinWeightGroupResponse()

    async def BroadcastWeights(self, request: Any, context: Any) -> trainer_pb2.BroadcastWeightsResponse:
        version, group = request.weights.version, self._group
        assert group is not None

        def send() -> None:
            tensors = self.tensors(version)
            for bucket in self._buckets:
                group.broadcast(pack(bucket, tensors, torch.empty(bucket.nbytes, dtype=torch.uint8)), 0, 20)

        await asyncio.to_thread(send)
        if self.dies:
            await asyncio.sleep(0.1)  # brief: the engine answers, which has everything
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return trainer_pb2.BroadcastWeightsResponse(checksums=self.checksums(version) if request.checksum else {})

    async def LeaveWeightGroup(self, request: Any, context: Any) -> trainer_pb2.TrainerLeaveWeightGroupResponse:
        if self._group is not None:
            self._group.abort()
        return trainer_pb2.TrainerLeaveWeightGroupResponse()


class FaultyReceiver(WeightReceiver):
    """Writes some tensors to wrong places."""

    fault = ""
    may_copy: threading.Event
    """Set while received tensors may be written."""

    def _copy(self, number: int) -> None:
        places = {**self._parameters, **self._wrong_places()}
        assert self.may_copy.wait(60)
        self._engine.gate.touch()
        for spec, tensor in self._received(number):
            places[spec.name].copy_(tensor)

    def _wrong_places(self) -> dict[str, torch.Tensor]:
        own = self._parameters
        layer = [name for name in own if ".layers.0." in name]
        if self.fault == "swapped":
            one, other = (name for name in layer if name.endswith("layernorm.weight"))
            return {one: own[other], other: own[one]}
        frozen = {"frozen": layer, "old": list(own)}.get(self.fault, [])
        return {name: torch.empty_like(own[name]) for name in frozen}


class Engine(rollout_pb2_grpc.RolloutServicer):
    """A transformers engine without its process, whose memory gets other weights when it has a fault."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.engine = TransformersEngine(
            self.model, str, [2], max_running_samples=8, on_output=lambda *_: None, on_failure=lambda *_, **__: None
        )
        self.receiver: FaultyReceiver | None = None
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.fault = ""
        self.served: dict[int, str] = {}
        """Digest of the memory by version."""

    async def JoinWeightGroup(self, request: Any, context: Any) -> rollout_pb2.JoinWeightGroupResponse:
        group = WeightGroup(Rendezvous.from_proto(request.group), request.rank)
        self.receiver = FaultyReceiver(self.engine, group, from_proto(request.manifest), stage_all=True)
        self.receiver.may_copy = self.may_copy
        await asyncio.to_thread(group.connect, 20)
        return rollout_pb2.JoinWeightGroupResponse()

    async def ReceiveWeights(self, request: Any, context: Any) -> rollout_pb2.ReceiveWeightsResponse:
        assert self.receiver is not None
        self.receiver.fault, version = self.fault, Version.from_proto(request.weights)
        self.engine.pause("in_place", 60, 20)

        checksums = await asyncio.to_thread(self.receiver.receive, version, 20, with_checksums=True)
        self.served[version.version] = digest_of(checksums)
        return rollout_pb2.ReceiveWeightsResponse(checksums=checksums if request.checksum else {})

    async def ResumeGeneration(self, request: Any, context: Any) -> rollout_pb2.ResumeGenerationResponse:
        if request.HasField("weights"):
            self.engine.gate.confirm(Version.from_proto(request.weights))
            assert request.digest == self.served[request.weights.version]
        self.engine.gate.resume()
        return rollout_pb2.ResumeGenerationResponse()

    async def LeaveWeightGroup(self, request: Any, context: Any) -> rollout_pb2.LeaveWeightGroupResponse:
        if self.receiver is not None:
            self.receiver.group.abort()
        if self.engine.gate.unconfirmed:
            self.engine.gate.quarantine()
        return rollout_pb2.LeaveWeightGroupResponse(quarantined=self.engine.gate.quarantined)


class World:
    """A trainer, an engine and the coordinator's synchronisation of them, on a board."""

    def __init__(self, kit: FleetKit, folder: Path) -> None:
        self.kit, self.folder, self.closing = kit, folder, contextlib.ExitStack()
        self.trainer, self.engine = Trainer(folder), Engine(folder)

    async def begin(self, verify: str = "always") -> None:
        """Start a coordinator, the first or one after it."""
        if self.kit.registry.get("trainer-0") is None:
            trainer = (trainer_pb2_grpc.add_TrainerServicer_to_server, self.trainer, "relaxd.v1.Trainer")
            await self.kit.serve("trainer-0", TRAINER, *trainer)
            engine = (rollout_pb2_grpc.add_RolloutServicer_to_server, self.engine, "relaxd.v1.Rollout")
            await self.kit.serve("rollout-0", ROLLOUT, *engine)
        self.context = context = self.kit.context(config_with(verify, self.folder))
        self.board = context.board
        await self.board.create(term=self.kit.store.term, groups_per_step=8, steps=9)
        self.sync = WeightSync(context, WeightsRecord())

    async def synchronise(self, version: int) -> str:
        """Send a version; returns why it failed."""
        sender, engine = self.kit.registry.get("trainer-0"), self.kit.registry.get("rollout-0")
        assert sender is not None
        assert engine is not None
        announced = Announcement(run_id=RUN, term=1, version=version, replica_id="trainer-0")

        async def then() -> None:
            return None

        await self.sync.synchronise(sender.member, [engine.member], announced, then)
        return self.sync.last_failure

    async def recorder(self, folder: Path) -> StepRecorder:
        """Return what moves steps and digests from the board to the run's folder, which it has taken over."""
        folder.mkdir(exist_ok=True)
        files = RunFiles(folder)
        self.closing.callback(files.close)
        recorder = StepRecorder(
            self.context,
            files,
            Curriculum(self.context.config, load_data(self.context.config).train),
            redis=RedisRetry(RUN),
            disk=FolderRetry(RUN, folder),
            sync_totals=self.sync.totals,
            on_step=lambda *_: None,
        )
        await recorder.take_over([])
        return recorder

    def problem(self, version: int) -> str:
        """Return the trainer's answer to a group that the engine wrote with what it serves as this version."""
        receipt = Receipt(version, self.engine.served[version], "rollout-0")
        check = ReceiptCheck(self.board.in_threads.sent_weights, may_be_unknown=False)
        return check.problem(train_group(version, receipts=[[receipt]] * 2), 0)


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    world = World(FleetKit(redis_url), make_tiny_model(tmp_path))
    await world.begin()
    with world.closing:
        yield world
    await world.kit.close()
    world.engine.engine.stop()


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_with_other_weights_is_named_and_serves_nothing(world: World, fault: str) -> None:
    """Two tensors swapped, a layer that keeps its values, or the version before under a new number."""
    assert await world.synchronise(1) == ""
    world.engine.fault = fault
    failure = await world.synchronise(2)
    more = f" and {FAULTS[fault] - 1} more tensors)"
    assert failure.startswith("engines hold other weights than the trainer sent as version 2 (rollout-0: model.")
    assert failure.endswith(more)
    assert world.engine.engine.gate.quarantined
    ((key, text),) = weight_problems(world.sync.wrong_engines()).items()
    assert key == (pb.ALARM_KIND_WEIGHTS, "rollout-0")
    assert text.startswith("rollout-0: it held other weights than the trainer sent as version 2: model.")
    # Others that have the same as the trainer may write with it.
    sent = {version: [digest_of(world.trainer.checksums(version))] for version in (1, 2)}
    assert await world.board.sent_weights() == sent
    world.engine.fault = ""
    assert await world.synchronise(2) == ""
    assert not world.engine.engine.gate.quarantined
    assert world.sync.wrong_engines() == {}
    assert world.problem(2) == ""


@pytest.mark.parametrize("fault", FAULTS)
async def test_samples_of_an_engine_that_nobody_compared_are_refused(world: World, fault: str) -> None:
    """Another coordinator sent the same version and recorded its digest; this engine it didn't see."""
    assert await world.synchronise(1) == ""
    await world.board.record_weights(term=world.kit.store.term, version=2, digest=digest_of(world.trainer.checksums(2)))
    world.kit.store.in_threads.take_over()
    await world.begin(verify="never")
    world.engine.fault = fault
    assert await world.synchronise(2) == ""
    digest = world.engine.served[2]
    was = "was sent as version 1" if fault == "old" else "no trainer of this run has sent since version 1"
    assert world.problem(1) == ""
    assert world.problem(2) == f"rollout-0 wrote tokens of version 2 with weights of digest {digest}, which {was}"


async def test_an_engine_serves_no_weights_that_are_not_on_record_after_a_failure(world: World) -> None:
    assert await world.synchronise(1) == ""
    world.trainer.dies = True
    assert await world.synchronise(2) == "could not transfer weights (trainer-0: UNAVAILABLE: gone)"
    assert world.engine.served[2] == digest_of(world.trainer.checksums(2))
    assert world.engine.engine.gate.quarantined
    assert sorted(await world.board.sent_weights()) == [1]
    world.trainer.dies = False
    assert await world.synchronise(2) == ""
    assert not world.engine.engine.gate.quarantined
    assert world.problem(2) == ""


async def test_an_engine_that_is_late_in_a_failed_synchronisation_serves_nothing(world: World) -> None:
    """It commits after it was told to leave and to go on."""
    assert await world.synchronise(1) == ""
    world.trainer.dies = True
    world.engine.may_copy.clear()
    assert "trainer-0: UNAVAILABLE: gone" in await world.synchronise(2)
    engine = world.engine.engine
    assert (engine.gate.weights, engine.gate.quarantined) == (Version(1, 1), False)
    world.engine.may_copy.set()
    await eventually(lambda: engine.gate.weights == Version(1, 2), "the late commit")
    assert not engine.gate.may_run()
    with pytest.raises(EngineError, match="doesn't name"):
        engine.gate.resume()
    world.trainer.dies = False
    assert await world.synchronise(2) == ""
    assert engine.gate.may_run()
    assert world.problem(2) == ""


@pytest.mark.parametrize("again", [False, True])
async def test_an_engine_serves_no_weights_that_a_coordinator_died_before_recording(world: World, again: bool) -> None:
    """Also if the version is on record with the digest of another trainer's weights."""
    assert await world.synchronise(1) == ""
    if again:
        assert await world.synchronise(2) == ""
        world.trainer.seed = 100
    dying = asyncio.Event()

    async def die(version: int, digest: str) -> None:
        dying.set()
        await asyncio.Event().wait()

    world.sync._record_digest = die  # type: ignore[method-assign]
    synchronising = asyncio.create_task(world.synchronise(2))
    await dying.wait()
    synchronising.cancel()
    await asyncio.wait({synchronising})
    assert bool(world.problem(2)), "its digest is on record"
    record = world.sync.record
    await world.begin()
    world.sync.record = record
    await world.sync._abort_recorded()
    assert world.engine.engine.gate.quarantined
    assert await world.synchronise(2) == ""
    assert world.engine.engine.gate.may_run()
    assert world.problem(2) == ""
    assert len((await world.board.sent_weights())[2]) == 1 + again


async def test_a_coordinator_knows_what_those_before_it_sent(world: World) -> None:
    assert await world.synchronise(1) == ""
    term = world.kit.store.term
    world.kit.store.in_threads.take_over()
    await world.begin()
    assert world.problem(1) == ""
    assert await world.synchronise(2) == ""
    assert sorted(await world.board.sent_weights()) == [1, 2]
    with pytest.raises(Fenced):
        await world.board.record_weights(term=term, version=3, digest="0" * 16)


async def test_the_board_keeps_as_many_digests_after_any_number_of_steps(world: World, tmp_path: Path) -> None:
    """What it forgets is in the run's folder, also when coordinators change."""
    steps, sizes = 8, []
    recorder = await world.recorder(tmp_path / "run")
    term = await world.board.new_trainer_term()
    await world.board.record_weights(term=world.kit.store.term, version=0, digest="d0")
    for step in range(1, steps + 1):
        if step == 5:
            world.kit.store.in_threads.take_over()
            await world.begin()
            recorder = await world.recorder(tmp_path / "run")
        await world.board.commit_step(term=term, step=step, plan={"groups": []}, metrics={})
        assert await world.synchronise(step) == ""
        await recorder.append_steps()
        sizes.append(len(await world.board.sent_weights()))
        assert world.problem(step) == ""
    assert sizes == [2, 3, 3, 3, 3, 3, 3, 3]  # max_staleness 1 and one before it, and the newest
    lines = list(read_lines(tmp_path / "run" / WEIGHTS))
    assert [line["version"] for line in lines] == list(range(steps + 1))
    assert lines[-1]["digest"] == digest_of(world.trainer.checksums(steps))
