"""What the tests of the trainer service share: the service as a process, a scripted coordinator, made-up groups."""

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from relaxd import PROTOCOL_VERSION
from relaxd.board import TEACHER_PROMPT_TOKENS, WEIGHT_RECEIPTS, Board, NewGroup, stages_for
from relaxd.config import RunConfig
from relaxd.roles import ROLES, TRAINER
from relaxd.rpc.client import sync_channel
from relaxd.run_folder import CONFIG, RECORD
from relaxd.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    replica_pb2,
    replica_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    weights_pb2,
)
from services.trainer.batch.groups import TrainGroup
from tests.kit.namespaces import Node
from tests.kit.processes import kill, start_python

RUN_ID = "run-1"
BEGUN = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
"""When the run began."""
PATIENCE = 120.0
"""Longest wait for anything, in seconds."""


def make_config(model: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of three steps of two groups of two samples; sections' settings on top."""
    values: dict[str, dict[str, Any]] = {
        "run": {"steps": 3, "seed": 5},
        "model": {"path": str(model)},
        "data": {"source": "addition"},
        "reward": {"name": "addition"},
        "rollout": {"samples_per_prompt": 2},
        "trainer": {
            "groups_per_step": 2,
            "micro_batch_tokens": 64,
            "threads": 1,
            "collective_timeout_seconds": 30,
            "optimizer": {"lr": 1e-3},
        },
        "board": {"lease_seconds": 5},
        "weights": {"bucket_bytes": 1 << 20, "timeout_seconds": 5, "connect_timeout_seconds": 10},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)


def several_updates(
    model: Path, algorithm: dict[str, Any], roles: dict[str, Any] | None = None, **trainer: Any
) -> RunConfig:
    """A run of two steps of four groups, two mini-batches and two epochs."""
    return make_config(
        model,
        run={"steps": 2},
        trainer={
            "groups_per_step": 4,
            "mini_batches": 2,
            "epochs": 2,
            "micro_batch_tokens": 48,
            "checkpoint": {"every": 0},
            "optimizer": {"lr": 2e-2, "min_lr": 1e-2, "schedule": "linear", "epsilon": 1e-3, "weight_decay": 0.1},
            **trainer,
        },
        algorithm=algorithm,
        roles=roles or {},
        board={"max_staleness": 8},
    )


def mark_folder(folder: Path, begun: datetime = BEGUN) -> None:
    """Write the files by which services know the folder of a run that began then."""
    (folder / RECORD).write_text(json.dumps({"begin_time": begun.isoformat()}))
    (folder / CONFIG).write_text("{}")


def train_group(version: int, receipts: Any, length: int = 3) -> TrainGroup:
    """A group of two samples that this version wrote, with what receipts are compared with."""
    columns = {
        "sample_of_sequence": np.arange(2, dtype=np.int32),
        "lengths": np.full(2, length, np.int32),
        "loss_mask": np.ones(2 * length, np.uint8),
        "versions": np.full(2 * length, version, np.int64),
        WEIGHT_RECEIPTS: receipts,
    }
    return TrainGroup("g1", columns)


class Feeder:
    """Plays coordinator and all stages before the trainer, on a real board."""

    def __init__(self, redis_url: str, config: RunConfig) -> None:
        self.board = Board(redis_url, RUN_ID, stages_for(config), config.board)
        self.board.create(term=1, groups_per_step=config.trainer.groups_per_step, steps=config.run.steps)
        self.board.set_gate(term=1, oldest_version=10_000, open=True)
        self._samples = config.rollout.samples_per_prompt
        self._privileged = config.has_privileged_teacher
        self._numbers = iter(range(1, 10_000))

    def publish(self, count: int = 1, trace: dict[str, str] | None = None, source: str = "") -> list[str]:
        """Publish prompts, of a source or of two in turn. Returns the groups' ids."""
        groups = []
        for _ in range(count):
            number = next(self._numbers)
            metadata = {"data_source": source or f"source-{number % 2}"}
            prompt = {"text": f"prompt {number}", "answer": str(number), "metadata": metadata, "index": number}
            columns = {"prompt_tokens": np.arange(3, 8, dtype=np.int32) + number % 7, "prompt": prompt}
            if self._privileged:
                columns[TEACHER_PROMPT_TOKENS] = np.arange(40, 49, dtype=np.int32) + number % 5
            groups.append(NewGroup(f"g{number}", columns, trace or {}))
        return self.board.publish(term=1, groups=groups)

    def begin(self, count: int, version: int) -> list[Any]:
        """Take published groups as an engine that serves `version`."""
        deliveries = self.board.take("rollout", "engine", count=count, block_seconds=1.0)
        assert len(deliveries) == count
        for delivery in deliveries:
            assert self.board.begin(delivery, version)
        return deliveries

    def finish(
        self,
        deliveries: Sequence[Any],
        version: int,
        length: int = 6,
        advantage: float = 1.0,
        least_advantage: float | None = None,
        rewards: Sequence[float] | None = None,
        **changes: Any,
    ) -> None:
        """Generate, score and judge groups that were begun; `advantage` is the largest of a group.

        A run without an advantage stage gets rewards only.
        """
        for delivery in deliveries:
            self.board.commit([(delivery, self._answers(delivery.group_id, version, length) | changes)])
        advantages = self._advantages(length, -advantage if least_advantage is None else least_advantage, advantage)
        of_stage = {"reward": self._rewards(rewards), "advantage": advantages}
        for stage, columns in of_stage.items():
            if stage not in {one.name for one in self.board.stages}:
                continue
            taken = self.board.take(stage, "tester", count=len(deliveries), block_seconds=1.0)
            assert len(taken) == len(deliveries)
            assert all(self.board.commit([(delivery, columns) for delivery in taken]))

    def feed(self, count: int, version: int, **changes: Any) -> list[str]:
        """Bring groups up to the train stage."""
        ids = self.publish(count)
        self.finish(self.begin(count, version), version, **changes)
        return ids

    def _answers(self, group_id: str, version: int, length: int) -> dict[str, Any]:
        generator = np.random.default_rng(int(group_id[1:]))
        total = self._samples * length
        return {
            "tokens": generator.integers(3, 250, total).astype(np.int32),
            "sample_of_sequence": np.arange(self._samples, dtype=np.int32),
            "lengths": np.full(self._samples, length, np.int32),
            "shares_prompt": np.ones(self._samples, np.uint8),
            "loss_mask": np.ones(total, np.uint8),
            "rollout_logprobs": np.full(total, -5.5, np.float32),
            "versions": np.full(total, version, np.int64),
            "finish": ["stop"] * self._samples,
            "text": [f"answer {i}" for i in range(self._samples)],
            "spans_weight_update": np.zeros(self._samples, np.uint8),
        }

    def _rewards(self, given: Sequence[float] | None) -> dict[str, Any]:
        rewards = np.arange(self._samples, dtype=np.float64) if given is None else np.array(given, np.float64)
        return {"reward": rewards, "reward_parts": {"accuracy": rewards.tolist(), "format": [1.0] * self._samples}}

    def _advantages(self, length: int, least: float, largest: float) -> dict[str, Any]:
        per_sample = np.linspace(least, largest, self._samples, dtype=np.float32)
        return {"advantages": np.repeat(per_sample, length)}


class ScriptedCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """A real gRPC server that assigns one run, marks its folder and writes down what it hears."""

    def __init__(self, config: RunConfig, folder: Path, role: str = TRAINER, host: str = "127.0.0.1") -> None:
        self._role = role
        self._condition = threading.Condition()
        self.assignment = coordinator_pb2.Assignment(
            run_id=RUN_ID,
            config_json=config.model_dump_json(),
            state=coordinator_pb2.RUN_STATE_RUNNING,
            folder=str(folder),
        )
        mark_folder(folder)
        self.assignment.begin_time.FromDatetime(BEGUN)
        self.address = ""
        self.announced: list[tuple[int, int]] = []
        self.status = replica_pb2.ReplicaStatus()
        self.details: list[str] = []
        """What the replica has said of itself, each detail once in a row."""
        self._server = grpc.server(ThreadPoolExecutor(8))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        self.host = host
        self.port = self._server.add_insecure_port(f"{host}:0")
        self._server.start()

    def Register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterResponse:
        assert request.registration.protocol_version == PROTOCOL_VERSION
        assert request.registration.role == self._role
        self._hear(address=request.registration.address)
        return coordinator_pb2.RegisterResponse(
            lease_seconds=5, gpu_lease_seconds=30, heartbeat_seconds=0.1, assignment=self.assignment
        )

    def Heartbeat(self, request: coordinator_pb2.HeartbeatRequest, context: Any) -> coordinator_pb2.HeartbeatResponse:
        new = [request.status.detail] if self.details[-1:] != [request.status.detail] else []
        self._hear(status=request.status, details=[*self.details, *new])
        return coordinator_pb2.HeartbeatResponse(assignment=self.assignment, gpu_lease_seconds=30)

    def LeaseGpus(self, request: coordinator_pb2.LeaseGpusRequest, context: Any) -> coordinator_pb2.LeaseGpusResponse:
        """Grant the first GPUs that a replica sees, whoever else may have them."""
        return coordinator_pb2.LeaseGpusResponse(gpu_uuids=request.candidate_uuids[: request.count])

    def AnnounceVersion(
        self, request: coordinator_pb2.AnnounceVersionRequest, context: Any
    ) -> coordinator_pb2.AnnounceVersionResponse:
        assert request.run_id == RUN_ID
        self._hear(announced=[*self.announced, (request.weights.term, request.weights.version)])
        return coordinator_pb2.AnnounceVersionResponse()

    def set_state(self, state: coordinator_pb2.RunState.ValueType) -> None:
        assignment = coordinator_pb2.Assignment()
        assignment.CopyFrom(self.assignment)
        assignment.state = state
        self.assignment = assignment

    def wait(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Wait until something that was heard makes `condition` true; returns what it returns."""
        with self._condition:
            assert self._condition.wait_for(condition, seconds), f"not within {seconds} s; last status: {self.status}"
            return condition()

    def wait_until_ready(self) -> None:
        self.wait(lambda: self.status.state == replica_pb2.REPLICA_STATE_READY)

    def wait_for_version(self, term: int, version: int) -> None:
        self.wait(lambda: (term, version) in self.announced)

    def wait_for_detail(self, part: str) -> str:
        """Wait until the replica has said something with `part`, if only for a moment; returns what it said."""
        said: str = self.wait(lambda: next((detail for detail in self.details if part in detail), ""))
        return said

    def close(self) -> None:
        self._server.stop(0).wait(5)

    def _hear(self, **values: Any) -> None:
        with self._condition:
            for name, value in values.items():
                setattr(self, name, value)
            self._condition.notify_all()


class TrainerProcess:
    """The trainer service, or another one with ranks, as a process."""

    def __init__(
        self,
        coordinator: ScriptedCoordinator,
        redis_url: str,
        environment: Mapping[str, str] | None = None,
        module: str = "services.trainer",
        *flags: str,
        within: Node | None = None,
    ) -> None:
        """`environment` is set on top of this process's; `within`: the node that it runs in."""
        self.coordinator = coordinator
        address = f"{coordinator.host}:{coordinator.port}"
        own = ("--coordinator", address, "--redis", redis_url, "--replica-id", "trainer-test", "--grace-seconds", "5")
        self.process = start_python("-m", module, *own, *flags, environment=environment, within=within)
        self._channel: grpc.Channel | None = None

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            self.coordinator.wait(lambda: self.coordinator.address)
            self._channel = sync_channel(self.coordinator.address, term=1)
        return self._channel

    @property
    def trainer(self) -> trainer_pb2_grpc.TrainerStub:
        return trainer_pb2_grpc.TrainerStub(self.channel)

    @property
    def replica(self) -> replica_pb2_grpc.ReplicaStub:
        return replica_pb2_grpc.ReplicaStub(self.channel)

    def rank_pid(self, rank: int = 0) -> int:
        """Process id of a rank."""
        return int(self.replica.GetStatus(replica_pb2.GetStatusRequest()).status.gauges[f"rank{rank}_pid"])

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        kill(self.process)


@contextlib.contextmanager
def trainer_service(
    config: RunConfig,
    redis_url: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    role: str = TRAINER,
    module: str = "",
) -> Iterator[tuple[ScriptedCoordinator, Feeder, TrainerProcess]]:
    """A run on the board, a coordinator that assigns it, and a trainer or another role that works on it.

    `module` is the service's, by default the role's only one.
    """
    feeder, coordinator = Feeder(redis_url, config), ScriptedCoordinator(config, folder, role)
    process = TrainerProcess(coordinator, redis_url, environment, module or ROLES[role].module)
    try:
        yield coordinator, feeder, process
    finally:
        process.close()
        coordinator.close()
        feeder.board.close()


class Receiver:
    """An engine's side of one weight group, in threads of the test."""

    def __init__(self, trainer: trainer_pb2_grpc.TrainerStub, name: str, sync_id: int = 1) -> None:
        """Connect with the trainer."""
        from relaxd.weights.buckets import from_proto
        from relaxd.weights.weight_group import Rendezvous, WeightGroup

        self._trainer = trainer
        self._pool = ThreadPoolExecutor(2)
        self.sync_id, self.name = sync_id, name
        self.manifest = trainer.GetWeightManifest(trainer_pb2.GetWeightManifestRequest())
        self.buckets = from_proto(self.manifest.manifest)
        request = join_request(self.manifest, name, sync_id)
        self.group = WeightGroup(Rendezvous.from_proto(request.group), self.manifest.source_ranks)
        connecting = self._pool.submit(self.group.connect, PATIENCE)
        trainer.JoinWeightGroup(request, timeout=PATIENCE)
        connecting.result(PATIENCE)

    def receive(self) -> tuple[dict[str, Any], trainer_pb2.BroadcastWeightsResponse]:
        """Take part in a broadcast. Returns the tensors, and what the trainer answered."""
        import torch

        from relaxd.weights.buckets import unpack

        answer = self._pool.submit(self._trainer.BroadcastWeights, self.request(checksum=True), PATIENCE)
        tensors = {}
        for bucket in self.buckets:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            self.group.broadcast(buffer, bucket.source_rank, PATIENCE)
            tensors |= {spec.name: tensor for spec, tensor in unpack(bucket, buffer)}
        return tensors, answer.result(PATIENCE)

    def leave_in_the_middle(self) -> grpc.StatusCode:
        """Leave a broadcast of several buckets after the first. Returns the status that it ends with."""
        import torch

        call = self._trainer.BroadcastWeights.future(self.request(), timeout=PATIENCE)
        first, *rest = self.buckets
        assert rest, "there is no middle: make the model larger"
        self.group.broadcast(torch.empty(first.nbytes, dtype=torch.uint8), first.source_rank, PATIENCE)
        self.leave()
        code: grpc.StatusCode = call.exception(timeout=PATIENCE).code()
        return code

    def request(self, **changes: Any) -> trainer_pb2.BroadcastWeightsRequest:
        """A request for the broadcast of what the trainer had when this receiver joined."""
        values = {
            "sync_id": self.sync_id,
            "group_name": self.name,
            "weights": self.manifest.weights,
            "timeout_seconds": 60.0,
        }
        return trainer_pb2.BroadcastWeightsRequest(**{**values, **changes})

    def leave(self) -> None:
        """Leave on both sides."""
        request = trainer_pb2.TrainerLeaveWeightGroupRequest(sync_id=self.sync_id, group_name=self.name)
        self._trainer.LeaveWeightGroup(request)
        self.group.abort()
        self._pool.shutdown()


def join_request(
    manifest: trainer_pb2.GetWeightManifestResponse, name: str, sync_id: int
) -> trainer_pb2.TrainerJoinWeightGroupRequest:
    """Invite the trainer into a group of its sources and one engine."""
    group = weights_pb2.WeightGroup(
        name=name,
        world_size=manifest.source_ranks + 1,
        store_host=manifest.store_host,
        store_port=manifest.store_port,
        transport="TRANSPORT_GLOO",
        timeout_seconds=60.0,
    )
    return trainer_pb2.TrainerJoinWeightGroupRequest(sync_id=sync_id, group=group)


def export(process: TrainerProcess, folder: str) -> Path:
    """Have the trainer write its model; where it is."""
    request = trainer_pb2.ExportHuggingFaceRequest(folder=folder)
    return Path(process.trainer.ExportHuggingFace(request, timeout=PATIENCE).path)


def error_code(call: Callable[[], Any]) -> grpc.StatusCode:
    """The status that a call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def trained_columns(feeder: Feeder, count: int) -> dict[str, dict[str, Any]]:
    """Return the columns that the trainer gets of the next groups, by group id."""
    board, found = feeder.board, {}
    while len(found) < count:
        deliveries = board.take("train", "trainer", count=count, block_seconds=PATIENCE)
        assert deliveries
        loaded = board.load(deliveries, board.needs("train"))
        found |= {delivery.group_id: columns for delivery, columns in zip(deliveries, loaded, strict=True)}
    return found
