"""The rollout service as processes, a scripted coordinator, a source of weights, a board."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from relaxd.board import Board, Delivery, NewGroup, stages_for
from relaxd.config import RunConfig
from relaxd.rpc.client import sync_channel
from relaxd.rpc.message_parts import words
from relaxd.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    replica_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
    sample_pb2,
    weights_pb2,
)
from relaxd.weights.receipts import digest_of
from tests.kit import processes
from tests.kit.processes import Partner, start_python

RUN_ID = "run-1"
PATIENCE = 120.0
READY, STARTING, QUARANTINED = (
    replica_pb2.REPLICA_STATE_READY,
    replica_pb2.REPLICA_STATE_STARTING,
    replica_pb2.REPLICA_STATE_QUARANTINED,
)


SHORT = 5
"""Longest answers of groups that are published with `short`."""


def make_config(model: Path, **rollout: Any) -> RunConfig:
    """A run of groups of three samples."""
    return RunConfig.model_validate(
        {
            "run": {"steps": 100, "seed": 5},
            "model": {"path": str(model)},
            # Of two sources one has shorter answers, so that the stage reads the groups' sampling.
            "data": {"source": "files", "sources": [{"path": "a"}, {"path": "b", "max_new_tokens": SHORT}]},
            "reward": {"name": "addition"},
            "rollout": {"samples_per_prompt": 3, "max_new_tokens": 12, "max_running_samples": 12, "threads": 1}
            | rollout,
            "board": {"lease_seconds": 2},
            "weights": {"verify": "always"},
        }
    )


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """A real gRPC server that assigns one run to whoever comes and keeps what they say."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._heard = threading.Condition()
        self.assignment = coordinator_pb2.Assignment(
            run_id=RUN_ID,
            config_json=config.model_dump_json(),
            state=coordinator_pb2.RUN_STATE_RUNNING,
            folder=str(folder),
        )
        self.addresses: dict[str, str] = {}
        self.statuses: dict[str, replica_pb2.ReplicaStatus] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterResponse:
        with self._heard:
            self.addresses[request.registration.replica_id] = request.registration.address
            self._heard.notify_all()
        return coordinator_pb2.RegisterResponse(lease_seconds=5, heartbeat_seconds=0.05, assignment=self.assignment)

    def Heartbeat(self, request: coordinator_pb2.HeartbeatRequest, context: Any) -> coordinator_pb2.HeartbeatResponse:
        with self._heard:
            self.statuses[request.replica_id] = request.status
            self._heard.notify_all()
        return coordinator_pb2.HeartbeatResponse(assignment=self.assignment)

    def wait_for(
        self,
        replica_id: str,
        condition: Callable[[replica_pb2.ReplicaStatus], object],
        patience: float = PATIENCE,
    ) -> None:
        """Until a replica's heartbeat says so."""
        with self._heard:
            heard = self._heard.wait_for(
                lambda: replica_id in self.statuses and condition(self.statuses[replica_id]), patience
            )
        assert heard, f"not within {patience} s; last status: {self.statuses.get(replica_id)}"

    def close(self) -> None:
        self._server.stop(0).wait(5)


class Source(Partner):
    """The trainer's side of the weight groups."""

    def __init__(self, model: Path, bucket_bytes: int) -> None:
        super().__init__("-m", "tests.integration.rollout.weight_source", str(model), str(bucket_bytes))
        self._hello: dict[str, Any] | None = None

    @property
    def port(self) -> int:
        return int(self._greeting()["port"])

    @property
    def manifest(self) -> weights_pb2.WeightManifest:
        return weights_pb2.WeightManifest.FromString(bytes.fromhex(self._greeting()["manifest"]))

    def _greeting(self) -> dict[str, Any]:
        if self._hello is None:
            self._hello = self.answer()
        return self._hello


class Replica:
    """One rollout service."""

    def __init__(self, coordinator: Coordinator, redis_url: str, replica_id: str) -> None:
        self.replica_id = replica_id
        self._coordinator = coordinator
        flags = ("--coordinator", f"127.0.0.1:{coordinator.port}", "--redis", redis_url, "--replica-id", replica_id)
        self.process = start_python("-m", "services.rollout", *flags, "--grace-seconds", "3")
        self._channel: grpc.Channel | None = None

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            self.wait_for(lambda status: status.state == READY)
            self._channel = sync_channel(self._coordinator.addresses[self.replica_id], term=1)
        return self._channel

    @property
    def stub(self) -> rollout_pb2_grpc.RolloutStub:
        return rollout_pb2_grpc.RolloutStub(self.channel)

    @property
    def status(self) -> replica_pb2.ReplicaStatus:
        return self._coordinator.statuses[self.replica_id]

    def wait_for(self, condition: Callable[[replica_pb2.ReplicaStatus], object], patience: float = PATIENCE) -> None:
        self._coordinator.wait_for(self.replica_id, condition, patience)

    def engine_pid(self) -> int:
        (engine,) = psutil.Process(self.process.pid).children()
        return engine.pid

    def generate(self, prompt: Sequence[int], n: int = 1, **sampling: Any) -> list[dict[str, Any]]:
        """All of the n samples, put together."""
        samples: list[dict[str, Any]] = [{"tokens": [], "logprobs": [], "versions": [], "parts": 0} for _ in range(n)]
        for part in self.stub.Generate(generate_request(prompt, n, **sampling), timeout=PATIENCE):
            sample = samples[part.sample]
            sample["tokens"] += part.tokens
            sample["logprobs"] += part.logprobs
            sample["versions"] += part.versions
            sample["parts"] += 1
            if part.finish_reason:
                assert "finish" not in sample
                sample |= {"finish": words(sample_pb2.FinishReason)[part.finish_reason], "text": part.text}
                samples[part.sample] = sample
        return samples

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        processes.kill(self.process)


def generate_request(prompt: Sequence[int], n: int = 1, **sampling: Any) -> rollout_pb2.GenerateRequest:
    values = {"max_new_tokens": 8, "temperature": 1.0} | sampling
    return rollout_pb2.GenerateRequest(prompt_tokens=prompt, n=n, sampling=values)


class Stage:
    """Everything around the replicas under test."""

    def __init__(
        self, model: Path, redis_url: str, folder: Path, *, bucket_bytes: int = 40_000, **rollout: Any
    ) -> None:
        self.model = model
        self._redis_url = redis_url
        self._bucket_bytes = bucket_bytes
        self.config = make_config(model, **rollout)
        self.coordinator = Coordinator(self.config, folder)
        self.source = Source(model, bucket_bytes)
        self.replicas: list[Replica] = []
        self.board = Board(redis_url, RUN_ID, stages_for(self.config), self.config.board)
        self.board.create(term=1, groups_per_step=4, steps=100)
        self.board.set_gate(term=1, oldest_version=1000, open=True)
        self.sync_id = 0
        self.term = 1
        self.digests: dict[int, str] = {}
        """Digests of what was sent, by version."""
        self._received: int | None = None
        """Version that was received since the last pause."""
        self._group_name = ""
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(4)

    def start_replica(self) -> Replica:
        replica = Replica(self.coordinator, self._redis_url, f"rollout-{len(self.replicas)}")
        self.replicas.append(replica)
        return replica

    def new_source(self) -> None:
        """The trainer died; here is the next one, with the next term."""
        self.source.close()
        self.source = Source(self.model, self._bucket_bytes)
        self.term += 1

    def pause(self, replicas: Sequence[Replica], mode: str = "IN_PLACE", lease: float = 30.0) -> list[int]:
        self.sync_id, self._received = self.sync_id + 1, None
        request = rollout_pb2.PauseGenerationRequest(
            sync_id=self.sync_id, mode=rollout_pb2.PauseMode.Value(f"PAUSE_MODE_{mode}"), lease_seconds=lease
        )
        return [replica.stub.PauseGeneration(request, timeout=20).paused_samples for replica in replicas]

    def join(self, replicas: Sequence[Replica], manifest: weights_pb2.WeightManifest | None = None) -> None:
        self._group_name = f"group-{self.term}-{self.sync_id}"
        group = weights_pb2.WeightGroup(
            name=self._group_name,
            world_size=len(replicas) + 1,
            store_host="127.0.0.1",
            store_port=self.source.port,
            transport="TRANSPORT_GLOO",
            timeout_seconds=20,
        )
        manifest = manifest or self.source.manifest
        requests = [
            rollout_pb2.JoinWeightGroupRequest(sync_id=self.sync_id, group=group, rank=rank, manifest=manifest)
            for rank in range(1, len(replicas) + 1)
        ]
        self.source.tell(do="connect", name=self._group_name, world_size=len(replicas) + 1)
        calls = [r.stub.JoinWeightGroup.future(q, timeout=25) for r, q in zip(replicas, requests, strict=True)]
        for call in calls:
            call.result()
        assert self.source.answer() == {}

    def receive(
        self, replica: Replica, version: int, timeout: float = 20, patience: float | None = None, **changes: Any
    ) -> Any:
        """A call under way, which its caller gives up after `patience` seconds."""
        values = {
            "sync_id": self.sync_id,
            "group_name": self._group_name,
            "weights": {"term": self.term, "version": version},
            "timeout_seconds": timeout,
            "checksum": True,
        }
        request = rollout_pb2.ReceiveWeightsRequest(**{**values, **changes})
        return replica.stub.ReceiveWeights.future(request, timeout=timeout + 5 if patience is None else patience)

    def transfer(self, replicas: Sequence[Replica], version: int) -> None:
        calls = [self.receive(replica, version) for replica in replicas]
        self.source.tell(do="broadcast", version=version, buckets=None)
        sent = self.source.answer()["checksums"]
        for call in calls:
            assert dict(call.result().checksums) == sent
        self.digests[version], self._received = digest_of(sent), version

    def resume(self, replicas: Sequence[Replica]) -> None:
        """As after a synchronisation that has succeeded, or one in which nothing was received."""
        request = rollout_pb2.ResumeGenerationRequest(sync_id=self.sync_id)
        if self._received is not None:
            request.weights.term, request.weights.version = self.term, self._received
            request.digest = self.digests[self._received]
        for replica in replicas:
            replica.stub.ResumeGeneration(request, timeout=10)

    def sync(self, version: int, replicas: Sequence[Replica] | None = None) -> None:
        """A whole synchronisation, with a new group."""
        replicas = replicas or self.replicas
        self.pause(replicas)
        self.join(replicas)
        self.transfer(replicas, version)
        self.resume(replicas)

    def leave(self, replica: Replica) -> bool:
        request = rollout_pb2.LeaveWeightGroupRequest(sync_id=self.sync_id, group_name=self._group_name)
        return bool(replica.stub.LeaveWeightGroup(request, timeout=5).quarantined)

    def publish(self, count: int, prompt: Sequence[int] = (5, 9, 17), *, short: bool = False) -> list[str]:
        """Publish prompts; returns the groups' ids."""
        example: dict[str, Any] = {"text": "p", "answer": "a", "metadata": {}}
        if short:
            example["sampling"] = {"max_new_tokens": SHORT}
        columns = {"prompt_tokens": np.array(prompt, np.int32), "prompt": example}
        return self.board.publish(
            term=1, groups=[NewGroup(f"g{next(self._numbers)}", columns, {}) for _ in range(count)]
        )

    def generated(self, count: int) -> dict[str, dict[str, Any]]:
        """The columns of groups that the rollout stage committed, by group id."""
        deliveries: list[Delivery] = []
        deadline = time.monotonic() + PATIENCE
        while len(deliveries) < count:
            assert time.monotonic() < deadline, f"{len(deliveries)} of {count} groups came"
            deliveries += self.board.take("reward", "tester", count=count, block_seconds=1.0)
        names = [
            "tokens",
            "lengths",
            "loss_mask",
            "rollout_logprobs",
            "versions",
            "finish",
            "text",
            "spans_weight_update",
            "weight_receipts",
            *(["continued"] if self.config.rollout.partial.enabled else []),
        ]
        loaded = self.board.load(deliveries, names)
        self.board.commit([(d, {"reward": np.zeros(3), "reward_parts": {}}) for d in deliveries])
        return {d.group_id: dict(columns or {}) for d, columns in zip(deliveries, loaded, strict=True)}

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self.source.close()
        self.coordinator.close()
        self.board.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
