"""Scripted services for `benchmarks.fleet`: many in one process, which compute nothing but call everything.

`python -m benchmarks.fleet_parts PART FIRST COUNT COORDINATOR REDIS`. PART is "rollout" (COUNT replicas, each with its
own heartbeats, GPUs, consumer and connection to Redis) or "rest" (one reward, one advantage, one trainer). Lines on its
standard input are commands, each answered with a line of JSON: "begin" (a window), "end" (what was measured in it).
"""

import asyncio
import json
import sys
import threading
import time
from typing import Any

import grpc
import numpy as np

from benchmarks.made_answers import answers
from relaxd import PROTOCOL_VERSION, __version__
from relaxd.board import Board, Column, Delivery, StageWorker, stages_for
from relaxd.config import RunConfig
from relaxd.roles import ADVANTAGE, REWARD, ROLLOUT, TRAINER
from relaxd.rpc.client import channel
from relaxd.rpc.server import Service, start_server
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, weights_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import REPLICA_STATE_IDLE, REPLICA_STATE_READY, ReplicaStatus, WeightVersion

GENERATE_SECONDS = 8.0
"""Time that a rollout replica takes for a group."""
TOKENS = 8
"""Tokens of a sample."""
TENSORS = 400
"""Tensors in the weight manifest."""
GPUS = 8
"""GPUs that each rollout replica sees and leases."""
CALL_SECONDS = 30.0


class Times:
    """Seconds that calls took, by name, and how many failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.failed: dict[str, int] = {}

    async def measure(self, name: str, call: Any) -> Any:
        """Await a call; returns None if it fails."""
        begun = time.perf_counter()
        try:
            answer = await call
        except grpc.aio.AioRpcError:
            self.failed[name] = self.failed.get(name, 0) + 1
            return None
        self.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return answer

    def take(self) -> dict[str, Any]:
        """Return what was measured since the last call."""
        found = {"seconds": self.seconds, "failed": self.failed}
        self.seconds, self.failed = {}, {}
        return found


class Member:
    """Keeps one replica registered, as relaxd.replica.membership does, and starts it on its run."""

    role = ""

    def __init__(self, name: str, address: str, stub: CoordinatorStub, redis: str, times: Times) -> None:
        self.name, self.address, self.stub, self.redis, self.times = name, address, stub, redis, times
        self.run_id = ""
        self.weights: WeightVersion | None = None
        self.done = 0

    async def live(self) -> None:
        """Register and send heartbeats for ever."""
        registration = pb.Registration(
            replica_id=self.name,
            instance=self.name,
            role=self.role,
            address=self.address,
            protocol_version=PROTOCOL_VERSION,
            package_version=__version__,
        )
        while True:
            request = pb.RegisterRequest(registration=registration)
            answer = await self.times.measure("Register", self.stub.Register(request, timeout=CALL_SECONDS))
            if answer is None:
                await asyncio.sleep(0.5)
                continue
            await self.begin()
            while answer is not None:
                await self.follow(answer.assignment)
                await asyncio.sleep(1.0)
                beat = pb.HeartbeatRequest(replica_id=self.name, status=self.status())
                answer = await self.times.measure("Heartbeat", self.stub.Heartbeat(beat, timeout=CALL_SECONDS))

    def status(self) -> ReplicaStatus:
        """Return a status as large as a real one."""
        return ReplicaStatus(
            replica_id=self.name,
            role=self.role,
            state=REPLICA_STATE_READY if self.run_id else REPLICA_STATE_IDLE,
            run_id=self.run_id,
            held_groups=1,
            done_groups=self.done,
            progress=self.done,
            weights=self.weights,
            package_version=__version__,
            protocol_version=PROTOCOL_VERSION,
            gauges={f"gauge_{number}": float(number) for number in range(8)},
        )

    async def begin(self) -> None:
        """Do what follows a registration."""

    async def follow(self, assignment: pb.Assignment) -> None:
        """Start the run that is assigned."""
        if assignment.run_id and not self.run_id:
            config = RunConfig.model_validate_json(assignment.config_json)
            board = Board(self.redis, assignment.run_id, stages_for(config), config.board)
            self.run_id = assignment.run_id
            await self.start(board, config)

    async def start(self, board: Board, config: RunConfig) -> None:
        """Begin to work on a run."""


class Rollout(Member):
    """Takes a group, waits as if it generated, and commits columns."""

    role = ROLLOUT

    async def begin(self) -> None:
        """Lease GPUs."""
        uuids = [f"GPU-{self.name}-{number}" for number in range(GPUS)]
        request = pb.LeaseGpusRequest(replica_id=self.name, candidate_uuids=uuids, count=GPUS)
        await self.times.measure("LeaseGpus", self.stub.LeaseGpus(request, timeout=CALL_SECONDS))

    async def start(self, board: Board, config: RunConfig) -> None:
        """Take groups in a thread."""
        threading.Thread(target=self._work, args=(board, config.rollout.samples_per_prompt), daemon=True).start()

    def _work(self, board: Board, samples: int) -> None:
        while True:
            if self.weights is None:
                time.sleep(0.2)
                continue
            for delivery in board.take(ROLLOUT, self.name, count=1, block_seconds=0.5):
                board.load([delivery], ["prompt_tokens"])
                version = self.weights.version
                board.begin(delivery, version)
                time.sleep(GENERATE_SECONDS)
                board.commit([(delivery, answers(samples, TOKENS, text="17", version=version))])
                self.done += 1


class Stage(Member):
    """The reward or the advantage replica."""

    def __init__(self, role: str, *arguments: Any) -> None:
        super().__init__(role, *arguments)
        self.role = role

    async def start(self, board: Board, config: RunConfig) -> None:
        """Work on the role's stage."""
        samples = config.rollout.samples_per_prompt
        columns: dict[str, Column] = (
            {"reward": np.ones(samples), "reward_parts": {}}
            if self.role == REWARD
            else {"advantages": np.zeros(samples * TOKENS, np.float32)}
        )

        def process(delivery: Delivery, given: dict[str, Column]) -> dict[str, Column]:
            self.done += 1
            return columns

        StageWorker(board, self.role, self.name, process, concurrency=64).start()


class Trainer(Member):
    """Commits a step whenever its groups are there, and announces it."""

    role = TRAINER

    async def start(self, board: Board, config: RunConfig) -> None:
        """Train in a task."""
        self._task = asyncio.create_task(self._train(board, config.trainer.groups_per_step))

    async def _train(self, board: Board, per_step: int) -> None:
        term = await asyncio.to_thread(board.new_trainer_term)
        step = await asyncio.to_thread(board.last_step)
        held: list[Delivery] = []
        while True:
            self.weights = WeightVersion(term=term, version=step)
            announced = pb.AnnounceVersionRequest(run_id=self.run_id, replica_id=self.name, weights=self.weights)
            while await self.times.measure("AnnounceVersion", self.stub.AnnounceVersion(announced)) is None:
                await asyncio.sleep(0.5)
            while len(held) < per_step:
                held += await asyncio.to_thread(
                    board.take, TRAIN_STAGE, self.name, count=per_step - len(held), block_seconds=0.5
                )
            step += 1
            groups = [delivery.group_id for delivery in held]
            await asyncio.to_thread(
                board.commit_step, term=term, step=step, plan={"groups": groups}, metrics={"loss": 0.0}
            )
            held, self.done = [], self.done + len(held)


TRAIN_STAGE = "train"


class RolloutCalls(rollout_pb2_grpc.RolloutServicer):
    """Answers the coordinator for all rollout replicas of the process."""

    def __init__(self, members: list[Rollout]) -> None:
        self.members = members

    async def JoinWeightGroup(self, request: Any, context: Any) -> Any:
        return rollout_pb2.JoinWeightGroupResponse()

    async def LeaveWeightGroup(self, request: Any, context: Any) -> Any:
        return rollout_pb2.LeaveWeightGroupResponse()

    async def PauseGeneration(self, request: Any, context: Any) -> Any:
        return rollout_pb2.PauseGenerationResponse()

    async def ResumeGeneration(self, request: Any, context: Any) -> Any:
        return rollout_pb2.ResumeGenerationResponse()

    async def ReceiveWeights(self, request: Any, context: Any) -> Any:
        for member in self.members:
            member.weights = request.weights
        return rollout_pb2.ReceiveWeightsResponse(seconds=0.001)


class TrainerCalls(trainer_pb2_grpc.TrainerServicer):
    """Answers the coordinator for the trainer."""

    async def GetWeightManifest(self, request: Any, context: Any) -> Any:
        tensors = [
            weights_pb2.TensorSpec(name=f"model.layers.{number}.mlp.experts.up_proj.weight", dtype=1, shape=[64, 64])
            for number in range(TENSORS)
        ]
        manifest = weights_pb2.WeightManifest(buckets=[weights_pb2.WeightBucket(tensors=tensors)])
        return trainer_pb2.GetWeightManifestResponse(
            manifest=manifest, source_ranks=1, store_host="127.0.0.1", store_port=1
        )

    async def JoinWeightGroup(self, request: Any, context: Any) -> Any:
        return trainer_pb2.TrainerJoinWeightGroupResponse()

    async def LeaveWeightGroup(self, request: Any, context: Any) -> Any:
        return trainer_pb2.TrainerLeaveWeightGroupResponse()

    async def BroadcastWeights(self, request: Any, context: Any) -> Any:
        return trainer_pb2.BroadcastWeightsResponse(seconds=0.001)


async def serve(part: str, first: int, count: int, coordinator: str, redis: str) -> None:
    """Run a part until its standard input ends."""
    times = Times()
    rollouts: list[Rollout] = []
    calls = (
        Service(rollout_pb2_grpc.add_RolloutServicer_to_server, RolloutCalls(rollouts), "relaxd.v1.Rollout")
        if part == ROLLOUT
        else Service(trainer_pb2_grpc.add_TrainerServicer_to_server, TrainerCalls(), "relaxd.v1.Trainer")
    )
    server = await start_server([calls])
    address = f"127.0.0.1:{server.port}"
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with channel(coordinator) as to_coordinator:
        common = (address, CoordinatorStub(to_coordinator), redis, times)
        members: list[Member]
        if part == ROLLOUT:
            rollouts += [Rollout(f"rollout-{first + number}", *common) for number in range(count)]
            members = list(rollouts)
        else:
            members = [Stage(REWARD, *common), Stage(ADVANTAGE, *common), Trainer(TRAINER, *common)]
        lives = [asyncio.create_task(member.live()) for member in members]
        while command := (await reader.readline()).decode().strip():
            found = times.take()
            found["done"] = sum(member.done for member in members)
            print(json.dumps(found if command == "end" else {"done": found["done"]}), flush=True)
        for life in lives:
            life.cancel()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]))
