"""The trainer's double."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from relaxd.board import Board, Delivery, Fenced, StepConflict, stages_for
from relaxd.config import RunConfig
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus
from relaxd.roles import TRAINER
from relaxd.rpc.client import channel
from relaxd.rpc.errors import FailedPrecondition
from relaxd.v1 import coordinator_pb2, trainer_pb2, trainer_pb2_grpc
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import WeightVersion
from relaxd.v1.weights_pb2 import WeightManifest
from tests.integration.peers.faults import Calls, SyncIds, misbehave
from tests.integration.peers.meeting import CHECKSUM, CHUNK, CHUNKS, Meeting

STEP_SECONDS = float(os.environ.get("PEER_STEP_SECONDS", "0.05"))


class TrainerDouble(ReplicaService, trainer_pb2_grpc.TrainerServicer):
    """Commits a step whenever a step's groups are there, without training."""

    role = TRAINER

    def __init__(self, context: ReplicaContext) -> None:
        self.context = context
        self.settings = context.settings
        self.calls, self.sync_ids, self.meeting = Calls(), SyncIds(), Meeting()
        self.weights: WeightVersion | None = None
        self.task: asyncio.Task[None] | None = None
        self.held = self.done = self.turns = 0
        self.paused = False
        self.broadcasting = asyncio.Lock()
        self.folder = Path()
        self.config: RunConfig | None = None

    async def start_run(self, config: RunConfig, assignment: coordinator_pb2.Assignment) -> None:
        if not self.meeting.port:
            await self.meeting.start()
        self.config, self.folder, self.paused = config, Path(assignment.folder), False
        self.board = Board(self.settings.redis, assignment.run_id, stages_for(config), config.board)
        self.term = await asyncio.to_thread(self.board.new_trainer_term)
        step = await asyncio.to_thread(self.board.last_step)
        self.weights = WeightVersion(term=self.term, version=step)
        self.task = asyncio.create_task(self.train(assignment.run_id))
        self.task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    async def stop_run(self) -> None:
        if self.task:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        self.weights, self.held = None, 0

    async def drain(self, seconds: float) -> int:
        return 0

    async def pause_run(self) -> None:
        self.paused = True

    async def resume_run(self) -> None:
        self.paused = False

    def status(self) -> ServiceStatus:
        return ServiceStatus(held_groups=self.held, done_groups=self.done, weights=self.weights, progress=self.turns)

    async def train(self, run_id: str) -> None:
        config, board, name = self.config, self.board, self.settings.replica_id
        async with channel(self.settings.coordinator) as to_coordinator:
            stub = CoordinatorStub(to_coordinator)
            await self.announce(stub, run_id)
            held: dict[str, tuple[int, Delivery]] = {}
            while self.weights.version < config.run.steps:
                self.turns += 1
                step = self.weights.version + 1
                taken = []
                if not self.paused:
                    taken = await asyncio.to_thread(board.take, "train", name, count=16, block_seconds=0.1)
                for delivery, columns in zip(taken, await self.load(taken, ["versions"]), strict=True):
                    if columns is not None:  # else closed since it was taken
                        held[delivery.group_id] = (int(columns["versions"].min()), delivery)
                await asyncio.to_thread(board.renew, "train", name, [delivery for _, delivery in held.values()])
                for group_id, (version, delivery) in list(held.items()):
                    if step - 1 - version > config.board.max_staleness:
                        await asyncio.to_thread(board.drop, delivery, reason="stale", retry=True)
                        del held[group_id]
                self.held = len(held)
                chosen = sorted(held, key=lambda group_id: held[group_id][0])[: config.trainer.groups_per_step]
                begun = await asyncio.to_thread(board.open_versions)
                due = {group_id for group_id, version in begun.items() if step - version > config.board.max_staleness}
                if len(chosen) < config.trainer.groups_per_step or due - set(chosen):
                    continue
                await asyncio.sleep(STEP_SECONDS)
                async with self.broadcasting:  # the optimizer waits for a broadcast
                    await self.commit(step, [held.pop(group_id)[1] for group_id in chosen])
                    self.weights = WeightVersion(term=self.term, version=step)
                self.held = len(held)
                await self.announce(stub, run_id)

    async def load(self, deliveries: list[Delivery], names: list[str]) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self.board.load, deliveries, names) if deliveries else []

    async def commit(self, step: int, deliveries: list[Delivery]) -> None:
        groups = await self.load(deliveries, ["prompt", "text", "reward", "versions", "lengths", "finish"])
        ids = [delivery.group_id for delivery in deliveries]
        oldest = min(int(group["versions"].min()) for group in groups)
        assert step - 1 - oldest <= self.config.board.max_staleness, f"step {step} got version {oldest}"
        samples = [
            {
                "group_id": group_id,
                "step": step,
                "prompt": group["prompt"]["text"],
                "answer": group["prompt"]["answer"],
                "response": group["text"][0],
                "reward": float(group["reward"][0]),
                "advantage": 0.5,
                "version": int(group["versions"].min()),
                "length": int(group["lengths"][0]),
                "finish_reason": group["finish"][0],
            }
            for group_id, group in zip(ids, groups, strict=True)
        ]
        metrics = {"reward_mean": float(np.mean([group["reward"].mean() for group in groups])), "loss": 1.0 / step}
        metrics["logprob_difference"] = 0.36 if self.board.run_id == "gap" else 1e-6
        plan = {"groups": ids, "texts": [group["prompt"]["text"] for group in groups]}
        self.calls.note("commit_step", step=step, term=self.term, groups=ids)
        try:
            await asyncio.to_thread(
                self.board.commit_step, term=self.term, step=step, plan=plan, metrics=metrics, samples=samples
            )
        except (Fenced, StepConflict) as error:
            print(f"step {step} was refused: {error}", file=sys.stderr)
            raise
        self.done += len(ids)

    async def announce(self, stub: CoordinatorStub, run_id: str) -> None:
        request = coordinator_pb2.AnnounceVersionRequest(
            run_id=run_id, replica_id=self.settings.replica_id, weights=self.weights
        )
        while True:
            try:
                await stub.AnnounceVersion(request, timeout=5)
                return
            except grpc.aio.AioRpcError:  # such as that of a coordinator that has just started
                await asyncio.sleep(0.2)

    async def GetWeightManifest(self, request, context):
        return trainer_pb2.GetWeightManifestResponse(
            manifest=WeightManifest(),
            source_ranks=1,
            store_host="127.0.0.1",
            store_port=self.meeting.port,
            weights=self.weights,
        )

    async def JoinWeightGroup(self, request, context):
        self.sync_ids.check(request.sync_id)
        await misbehave(self.calls.note("JoinWeightGroup", sync_id=request.sync_id, group=request.group.name))
        await self.meeting.join(request.group.name, request.group.world_size, request.group.timeout_seconds)
        return trainer_pb2.TrainerJoinWeightGroupResponse()

    async def BroadcastWeights(self, request, context):
        self.sync_ids.check(request.sync_id)
        fault = self.calls.note(
            "BroadcastWeights", sync_id=request.sync_id, group=request.group_name, version=request.weights.version
        )
        await misbehave(fault)
        if request.weights != self.weights:
            raise FailedPrecondition(f"the trainer holds version {self.weights.version}")
        if request.group_name not in self.meeting.members:
            raise FailedPrecondition(f"no group {request.group_name}")
        async with self.broadcasting:
            await self.meeting.broadcast(request.group_name, request.timeout_seconds)
        checksums = {"w": CHECKSUM} if request.checksum else {}
        return trainer_pb2.BroadcastWeightsResponse(bytes=CHUNKS * CHUNK, checksums=checksums)

    async def LeaveWeightGroup(self, request, context):
        self.sync_ids.check(request.sync_id)
        self.calls.note("LeaveWeightGroup", sync_id=request.sync_id, group=request.group_name)
        self.meeting.leave(request.group_name)
        return trainer_pb2.TrainerLeaveWeightGroupResponse()

    async def SaveCheckpoint(self, request, context):
        self.calls.note("SaveCheckpoint", rotate=request.rotate)
        return trainer_pb2.TrainerSaveCheckpointResponse(path="checkpoint", weights=self.weights)

    async def ExportHuggingFace(self, request, context):
        await misbehave(self.calls.note("ExportHuggingFace", folder=request.folder))
        path = self.folder / request.folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps({"version": self.weights.version}))
        return trainer_pb2.ExportHuggingFaceResponse(path=str(path), weights=self.weights)
