"""The trainer service sends its weights: what arrives, what is refused, what happens when the receiver dies."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from relaxd.v1 import replica_pb2, trainer_pb2, weights_pb2
from relaxd.weights.buckets import checksum, from_proto
from tests.integration.trainer.service_kit import (
    Receiver,
    TrainerProcess,
    error_code,
    export,
    join_request,
    make_config,
    several_updates,
    trainer_service,
)
from tests.kit.models import make_tiny_model
from tests.kit.processes import kill, start_python

DYING_RECEIVER = """
import sys, time
import torch
from relaxd.weights.weight_group import Rendezvous, WeightGroup
host, port, name, nbytes = sys.argv[1:]
print("imported", flush=True)
meet = Rendezvous(transport="gloo", store_host=host, store_port=int(port), name=name, world_size=2)
group = WeightGroup(meet, 1)
group.connect(60.0)
group.broadcast(torch.empty(int(nbytes), dtype=torch.uint8), 0, 60.0)
print("received one of several buckets", flush=True)
time.sleep(600)
"""


BROADCAST_SECONDS = 7.0
"""Longer than what is left of a step takes, so that its optimizer has to wait."""
PATIENCE = 60.0
"""Limit of what is to end long before."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several buckets on each of two ranks, so that a broadcast has a middle."""
    return make_tiny_model(tmp_path_factory.mktemp("qwen3") / "model", architecture="qwen3", intermediate_size=2048)


def exported(process: TrainerProcess, folder: str) -> dict[str, np.ndarray]:
    """The tensors of an export."""
    files = sorted(export(process, folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_received(receiver: Receiver, process: TrainerProcess, folder: str) -> None:
    """One broadcast brings what an export has, bit for bit."""
    tensors, answer = receiver.receive()
    expected = exported(process, folder)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=name)
        assert answer.checksums[name] == checksum(tensor)
    assert answer.bytes == sum(array.nbytes for array in expected.values())
    assert answer.seconds > 0


def test_weights_arrive_and_wrong_requests_are_refused(model: Path, redis_url: str, tmp_path: Path) -> None:
    with trainer_service(make_config(model), redis_url, tmp_path) as (coordinator, feeder, process):
        coordinator.wait_for_version(1, 0)
        receiver = Receiver(process.trainer, "group-1", sync_id=3)
        assert_received(receiver, process, "version-0")
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)

        def broadcast(**changes: object) -> grpc.StatusCode:
            return error_code(lambda: process.trainer.BroadcastWeights(receiver.request(**changes)))

        version_1 = replica_pb2.WeightVersion(term=1, version=1)
        refused = grpc.StatusCode.FAILED_PRECONDITION
        assert broadcast() is refused  # version 0 is gone
        assert broadcast(weights=replica_pb2.WeightVersion(term=2, version=1)) is refused
        assert broadcast(weights=version_1, sync_id=2) is refused
        assert broadcast(weights=version_1, group_name="other") is refused
        assert broadcast(weights=version_1, timeout_seconds=0) is grpc.StatusCode.INVALID_ARGUMENT
        wrong = weights_pb2.WeightGroup(name="", world_size=1, transport=7, timeout_seconds=-1)
        join = trainer_pb2.TrainerJoinWeightGroupRequest(sync_id=3, group=wrong)
        assert error_code(lambda: process.trainer.JoinWeightGroup(join)) is grpc.StatusCode.INVALID_ARGUMENT
        # None of that has touched the group: the same one carries the next version.
        receiver.manifest.weights.CopyFrom(version_1)
        assert_received(receiver, process, "version-1")
        receiver.leave()
        assert broadcast(weights=version_1) is refused
        # An engine that never comes costs the group, after its time.
        lonely = join_request(receiver.manifest, "lonely", 4)
        lonely.group.timeout_seconds = 0.5
        assert error_code(lambda: process.trainer.JoinWeightGroup(lonely)) is grpc.StatusCode.ABORTED
        # An engine that leaves ends the broadcast that waits for it.
        leaving = Receiver(process.trainer, "group-2", sync_id=5)
        started = time.monotonic()
        assert leaving.leave_in_the_middle() is grpc.StatusCode.ABORTED
        assert time.monotonic() - started < leaving.request().timeout_seconds / 2
        assert coordinator.status.weights == version_1


@pytest.mark.slow
def test_receiver_killed_in_the_middle_costs_at_most_the_timeout(model: Path, redis_url: str, tmp_path: Path) -> None:
    with trainer_service(make_config(model), redis_url, tmp_path) as (coordinator, feeder, process):
        coordinator.wait_for_version(1, 0)
        manifest = process.trainer.GetWeightManifest(trainer_pb2.GetWeightManifestRequest())
        first, *_ = from_proto(manifest.manifest)
        rank = process.rank_pid()
        for number, dies in enumerate((True, False), start=1):
            name = f"group-{number}"
            place = (manifest.store_host, str(manifest.store_port), name, str(first.nbytes))
            engine = start_python("-c", DYING_RECEIVER, *place, stdout=subprocess.PIPE, text=True)
            try:
                assert engine.stdout is not None
                assert engine.stdout.readline() == "imported\n"  # which takes a busy machine longer than a join may
                process.trainer.JoinWeightGroup(join_request(manifest, name, number), timeout=PATIENCE)
                feeder.feed(1, number - 1)  # most of the step, and what only the first one costs
                coordinator.wait(lambda number=number: f"step {number}: 1 groups" in coordinator.status.detail)
                seconds = PATIENCE if dies else BROADCAST_SECONDS
                version = replica_pb2.WeightVersion(term=1, version=number - 1)
                request = trainer_pb2.BroadcastWeightsRequest(
                    sync_id=number, group_name=name, weights=version, timeout_seconds=seconds
                )
                started = time.monotonic()
                call = process.trainer.BroadcastWeights.future(request, timeout=2 * PATIENCE)
                assert engine.stdout.readline() == "received one of several buckets\n"
                # The step's forward and backward run meanwhile; its optimizer waits for the broadcast.
                feeder.feed(1, number - 1)
                coordinator.wait(lambda: "waiting for a weight broadcast to end" in coordinator.status.detail)
                assert feeder.board.last_step() == number - 1
                assert not call.done()
                if dies:
                    os.kill(engine.pid, signal.SIGKILL)
                assert call.exception(timeout=2 * PATIENCE).code() is grpc.StatusCode.ABORTED
                coordinator.wait_for_version(1, number)
                assert time.monotonic() - started < PATIENCE / 2
            finally:
                kill(engine)
        assert process.rank_pid() == rank
        assert_received(Receiver(process.trainer, "group-9", sync_id=9), process, "model")


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ["tensor_parallel", "pipeline_parallel"])
def test_weights_of_two_ranks_arrive(arrangement: str, model: Path, redis_url: str, tmp_path: Path) -> None:
    config = make_config(model, trainer={"ranks": 2, arrangement: 2})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        # One that goes away in the middle leaves no rank waiting for another.
        assert Receiver(process.trainer, "group-1", sync_id=1).leave_in_the_middle() is grpc.StatusCode.ABORTED
        receiver = Receiver(process.trainer, "group-2", sync_id=2)
        assert_received(receiver, process, "model")
        receiver.leave()


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"ranks": 2, "tensor_parallel": 2}, marks=pytest.mark.slow)], ids=["one", "tensor"]
)
def test_an_engine_that_joins_between_updates_gets_the_weights_before_them(
    layout: dict[str, int], tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    config = several_updates(tiny_qwen3, {}, epochs=200, **layout)
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        coordinator.wait_for_version(1, 0)
        receiver = Receiver(process.trainer, "group-1")
        before, _ = receiver.receive()
        feeder.feed(4, 0)
        later = re.compile(r"update ([2-9]|\d\d+) of 400")
        coordinator.wait(lambda: any(later.search(detail) for detail in coordinator.details))
        between, _ = receiver.receive()
        assert coordinator.announced == [(1, 0)]  # the updates go on
        assert coordinator.status.gauges["changing_weights"] == 0
        assert all(torch.equal(between[name], tensor) for name, tensor in before.items())
        coordinator.wait_for_version(1, 1)
        assert feeder.board.ledger()[0].metrics["optimizer_steps"] == 400
        receiver.manifest.weights.version = 1
        assert_received(receiver, process, "model")
        after, _ = receiver.receive()
        assert not any(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_two_data_parallel_ranks_train_like_one(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    ledgers, exports = [], []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        config = make_config(tiny_qwen3, trainer={"ranks": ranks, "micro_batch_tokens": 24})
        url = redis_url.removesuffix("/0") + f"/{ranks}"
        with trainer_service(config, url, folder) as (coordinator, feeder, process):
            for step in (1, 2):
                feeder.feed(2, step - 1)
                coordinator.wait_for_version(1, step)
            ledgers.append(feeder.board.ledger())
            exports.append(exported(process, "model"))
            if ranks == 2:
                assert len(ledgers[1][0].plan["mini_batches"][0]["rounds"][0]) == 2
                os.kill(process.rank_pid(1), signal.SIGKILL)
                coordinator.wait_for_version(2, 2)
                replayed = exported(process, "again")
                assert all(np.array_equal(replayed[name], array) for name, array in exports[1].items())
                feeder.feed(2, 2)
                coordinator.wait_for_version(2, 3)
                assert process.stop() == 0
    for one, two in zip(*ledgers, strict=True):
        for name in ("loss", "grad_norm", "logprob_difference", "entropy"):
            assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4, abs=1e-6), name
    for name, array in exports[0].items():
        np.testing.assert_allclose(exports[1][name], array, atol=1e-4, err_msg=name)
