"""Ranks wait for each other's files for longer than for a collective, and not for ever."""

import os
import signal
from pathlib import Path

import pytest

from relaxd.v1 import trainer_pb2
from tests.integration.trainer.checkpoints.slow_disks import Slow, slow_disk, slowed
from tests.integration.trainer.service_kit import export, make_config, trainer_service
from tests.kit.models import make_tiny_model
from tests.kit.waiting import PATIENCE

COLLECTIVE_SECONDS = 3.0 * min(PATIENCE, 2.0)
DISK_SECONDS = COLLECTIVE_SECONDS + 0.5
"""A collective may not take as long as any of the slow calls."""


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3") / "model", architecture="qwen3")


@pytest.mark.night
@pytest.mark.timeout(300)
def test_files_may_take_longer_than_a_collective(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = {"ranks": 2, "tensor_parallel": 2, "collective_timeout_seconds": COLLECTIVE_SECONDS}
    config = make_config(tiny_qwen3, trainer={**trainer, "checkpoint": {"every": 0}})
    slow = (
        Slow(1, "read", "*/qwen3*/model/model.safetensors", DISK_SECONDS),  # the initial model
        Slow(0, "write", "*/step-000001.*.partial", DISK_SECONDS),
        Slow(0, "write", "*/before.partial/*.safetensors", DISK_SECONDS),  # an export: the tensors
        Slow(0, "rename", "*/before.partial", DISK_SECONDS),  # and its end
        Slow(0, "write", "*/common.json", DISK_SECONDS),  # a checkpoint
        Slow(0, "write", "*/rank-00000-0.safetensors", DISK_SECONDS),
        Slow(0, "write", "*/manifest.json", DISK_SECONDS),
        Slow(1, "read", "*/checkpoints/step-*/rank-*.safetensors", DISK_SECONDS, times=2),  # checking and loading it
        Slow(1, "read", "*/step-000002.safetensors", DISK_SECONDS),  # replay
    )
    with trainer_service(config, redis_url, tmp_path, slow_disk(*slow)) as (coordinator, feeder, process):
        coordinator.wait_for_detail("model: waiting for rank 1, which has processed 0 B")
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        path = process.trainer.SaveCheckpoint(trainer_pb2.TrainerSaveCheckpointRequest(), timeout=60).path
        assert Path(path).name == "step-000001"
        feeder.feed(2, 1)
        coordinator.wait_for_version(1, 2)
        before = export(process, "before")
        assert coordinator.announced == [(1, 0), (1, 1), (1, 2)]  # no rank has died
        os.kill(process.rank_pid(), signal.SIGKILL)
        coordinator.wait_for_version(2, 2)
        after = export(process, "after")
        assert (after / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()
        assert coordinator.announced[-1] == (2, 2)
    assert slowed(capfd.readouterr().err) == {(one.operation, one.path) for one in slow}


@pytest.mark.night
def test_a_disk_that_stands_still_is_given_up_and_named(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = make_config(tiny_qwen3, trainer={"ranks": 2, "disk_stall_seconds": 2.0})
    disk = slow_disk(Slow(1, "read", "*/model.safetensors", 1000.0))
    with trainer_service(config, redis_url, tmp_path, disk) as (coordinator, _, _):
        said = coordinator.wait_for_detail("DiskStalled: reading")
        assert "rank 1, which has processed 0 B, made no progress for 2 s (trainer.disk_stall_seconds = 2)" in said
