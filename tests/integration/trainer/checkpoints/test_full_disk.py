"""The trainer on a full disk: no rank fails, nothing waits in a collective, and nothing is lost."""

import re
import shutil
from functools import partial
from pathlib import Path

import grpc
import pytest

from relaxd.run_folder import checkpoint_path, checkpoint_steps, checkpoints_folder
from relaxd.v1 import trainer_pb2
from relaxd.v1.replica_pb2 import REPLICA_WAIT_DISK
from services.trainer.batch.step_plan import read_committed, step_file_path
from services.trainer.loop.checkpoint_folders import verify
from tests.integration.trainer.service_kit import (
    RUN_ID,
    Feeder,
    TrainerProcess,
    export,
    make_config,
    trainer_service,
)
from tests.integration.trainer.trainer_worlds import Job, make_learner, make_model
from tests.kit.disks import full_disk
from tests.kit.waiting import wait_until


def refusal(process: TrainerProcess, what: str) -> str:
    """Return the trainer's error when it can't write a checkpoint or an export."""
    request = trainer_pb2.TrainerSaveCheckpointRequest()
    ask = partial(process.trainer.SaveCheckpoint, request, timeout=60) if what == "checkpoint" else None
    with pytest.raises(grpc.RpcError) as refused:
        (ask or partial(export, process, what))()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(refused.value.details())


@pytest.mark.slow
def test_two_ranks_outlive_a_full_disk(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = make_config(
        tiny_qwen3,
        trainer={
            "ranks": 2,
            "tensor_parallel": 2,
            "collective_timeout_seconds": 4.5,
            "disk_stall_seconds": 4.5,
            "checkpoint": {"every": 0},
        },
    )
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        request = trainer_pb2.TrainerSaveCheckpointRequest()
        assert process.trainer.SaveCheckpoint(request, timeout=60).weights.version == 1

        feeder.feed(2, 1)
        coordinator.wait_for_version(1, 2)
        checkpoints = checkpoints_folder(tmp_path)
        for rank in (1, 0):
            with full_disk(pid=process.rank_pid(rank)):
                said = refusal(process, "checkpoint")
            assert f"rank {rank}: " in said
            assert "File too large" in said or "file write failed" in said
            room = re.search(r"it needs ([0-9.]+) MB on the disk of (\S+), which has ", said)
            assert room is not None, said
            assert 0.5 < float(room[1]) < 1.5
            assert room[2] == str(checkpoints)
            assert [path.name for path in checkpoints.iterdir()] == ["step-000001"], "nothing else takes room"
        with full_disk(pid=process.rank_pid()):
            assert "File too large" in refusal(process, "model")
            assert not list(tmp_path.glob("model*"))
            feeder.feed(2, 2)
            path = step_file_path(tmp_path, 3)
            coordinator.wait(lambda: coordinator.status.detail.startswith(f"waiting for the disk of {path.parent}"))
            assert coordinator.status.wait == REPLICA_WAIT_DISK
            assert coordinator.status.held_groups == 2
            # Requests are served meanwhile, and the other rank waits for longer than it may in a collective.
            told = coordinator.status.progress
            refusal(process, "checkpoint")
            coordinator.wait(lambda: coordinator.status.progress > told + 240)
            assert len(list(path.parent.iterdir())) == 2
            assert coordinator.announced[-1] == (1, 2)
        coordinator.wait_for_version(1, 3)
        assert coordinator.announced == [(1, 0), (1, 1), (1, 2), (1, 3)], "no rank has died"
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open, counts.dropped) == (6, 0, 0)
        (entry,) = feeder.board.ledger(after_step=2)
        assert list(read_committed(tmp_path, 3, entry.plan).plan.groups) == ["g5", "g6"]
        assert len(list(path.parent.iterdir())) == 3
        assert process.trainer.SaveCheckpoint(request, timeout=60).weights.version == 3
        assert checkpoint_steps(tmp_path) == [3, 1]
        verify(checkpoint_path(tmp_path, 3))
        assert (export(process, "model") / "model.safetensors").is_file()


def test_a_checkpoint_that_does_not_fit_is_not_begun(
    redis_url: str, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.trainer.loop.checkpoint_control import Answer, Checkpoints
    from services.trainer.loop.commanded_rank import CheckpointPart, CommandedRank
    from services.trainer.megatron.channels import RankChannel
    from services.trainer.megatron.disk_work import DiskRefused

    model = make_model(tmp_path / "qwen3", "qwen3", tied=True)
    learner, config = make_learner(Job(model)), make_config(model, trainer={"checkpoint": {"keep": 3}})
    feeder, channel = Feeder(redis_url, config), RankChannel(30.0, learner.world.disk)
    rank = CommandedRank(channel, learner, CheckpointPart(learner), feeder.board, tmp_path)
    checkpoints, folder = Checkpoints(config, RUN_ID, 1, rank), checkpoints_folder(tmp_path)

    def save() -> Answer:
        answer = checkpoints.request()
        checkpoints.begin_if_wanted(learner.step)

        def ended() -> bool:
            checkpoints.complete_if_written()
            return answer.done()

        wait_until(ended, "the end of the checkpoint")
        return answer

    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300_000))
        for _ in range(2):
            with pytest.raises(DiskRefused) as refused:
                save().result()
            said = str(refused.value)
            assert "nothing of it was written, because it doesn't fit; it needs " in said
            assert f" on the disk of {folder}, which has 300 kB left. Remove what isn't needed there, " in said
            assert said.endswith("or lower trainer.checkpoint.keep = 3")
            assert list(folder.iterdir()) == []
    assert save().result() == (str(checkpoint_path(tmp_path, 0)), 0)
    verify(checkpoint_path(tmp_path, 0))
    feeder.board.close()
