"""The trainer service saves, dies, and comes back from its checkpoints and step files, bit for bit."""

import json
import os
import random
import signal
import time
from pathlib import Path

import grpc
import pytest

from relaxd.cli import run_checkpoints
from relaxd.run_folder import checkpoint_path, checkpoint_steps, checkpoints_folder
from relaxd.v1 import trainer_pb2
from services.trainer.batch.step_plan import step_file_path
from services.trainer.loop.checkpoint_folders import MANIFEST, plan_sha256, read_state, verify
from tests.integration.trainer.checkpoints.checkpoint_kit import (
    config_of,
    kill_and_wait,
    train_to,
    wait_for_checkpoint,
    weights,
)
from tests.integration.trainer.checkpoints.slow_disks import Slow, slow_disk
from tests.integration.trainer.service_kit import (
    export,
    trainer_service,
)
from tests.kit.waiting import wait_until


@pytest.mark.slow
def test_checkpoints_come_and_go_and_the_weights_come_back(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    with trainer_service(config_of(tiny_qwen3), redis_url, tmp_path) as (coordinator, feeder, process):
        train_to(coordinator, feeder, 1, 1, 2)
        first = wait_for_checkpoint(tmp_path, 2)
        verify(first)
        state = read_state(first)
        assert (state.run_id, state.step, state.term, state.ledger.step) == ("run-1", 2, 1, 2)
        assert (state.board.published, state.board.trained, state.board.open_groups) == (4, 4, ())
        assert float(state.weights_checksum) == feeder.board.ledger()[1].metrics["weights_checksum"]
        train_to(coordinator, feeder, 1, 3, 5)
        wait_for_checkpoint(tmp_path, 4)
        assert feeder.board.ledger()[2].metrics["checkpoint_seconds"] > 0  # the stall after step 2, in step 3
        # Two are kept; the files of the steps that both cover are gone, the others are there.
        assert checkpoint_steps(tmp_path) == [4, 2]
        wait_until(lambda: [step for step in range(1, 6) if step_file_path(tmp_path, step).exists()] == [3, 4, 5])
        before = export(process, "before")

        kill_and_wait(coordinator, process, 2, 5)
        assert weights(export(process, "after")) == weights(before)

        # The newest is damaged: the one before does, and the damaged one is put aside.
        newest = checkpoint_path(tmp_path, 4)
        data = newest / "rank-00000-0.safetensors"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        kill_and_wait(coordinator, process, 3, 5)
        assert weights(export(process, "again")) == weights(before)
        assert checkpoint_steps(tmp_path) == [2]
        assert newest.with_name("step-000004.broken").is_dir()

        # It goes on as if nothing had happened, and what was broken is forgotten with what is older than it.
        train_to(coordinator, feeder, 3, 6, 8)
        wait_for_checkpoint(tmp_path, 8)
        wait_until(lambda: checkpoint_steps(tmp_path) == [8, 6])
        wait_until(lambda: not newest.with_name("step-000004.broken").exists())
        assert process.stop() == 0


@pytest.mark.slow
def test_a_crash_in_the_middle_of_a_save_leaves_the_one_before(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3, every=1, checkpoint={"keep_step_files": "always"})
    middle = Slow(0, "write", "*/.step-000002.1.partial/manifest.json", 60.0)  # until it is killed
    with trainer_service(config, redis_url, tmp_path, slow_disk(middle)) as (coordinator, feeder, process):
        train_to(coordinator, feeder, 1, 1, 1)
        wait_for_checkpoint(tmp_path, 1)
        pid = process.rank_pid()
        feeder.feed(2, 1)
        partial = checkpoints_folder(tmp_path) / ".step-000002.1.partial"
        wait_until(partial.exists, "a partial checkpoint")
        os.kill(pid, signal.SIGKILL)
        coordinator.wait(lambda: coordinator.announced[-1][0] == 2 and coordinator.announced[-1][1] == 2)
        assert not partial.exists()
        for step in checkpoint_steps(tmp_path):
            verify(checkpoint_path(tmp_path, step))
        # Redis comes back without its last second: a checkpoint that the ledger doesn't know isn't used.
        saved = process.trainer.SaveCheckpoint(trainer_pb2.TrainerSaveCheckpointRequest(), timeout=120)
        assert (Path(saved.path), saved.weights.version) == (checkpoint_path(tmp_path, 2), 2)
        after = export(process, "after")
        client, prefix = feeder.board._connection.client, feeder.board.prefix
        (first, fields), _ = client.xrange(f"{prefix}ledger")
        client.delete(f"{prefix}ledger", f"{prefix}samples")
        client.xadd(f"{prefix}ledger", fields, id=first)
        client.hset(f"{prefix}state", mapping={"last_step": 1})
        kill_and_wait(coordinator, process, 3, 1)
        assert weights(export(process, "earlier")) != weights(after)
        # It is put aside, or it would be taken for the checkpoint of the step that has its number next.
        assert checkpoint_steps(tmp_path) == [1]
        assert checkpoint_path(tmp_path, 2).with_name("step-000002.broken").is_dir()
        train_to(coordinator, feeder, 3, 2, 2)
        process.trainer.SaveCheckpoint(trainer_pb2.TrainerSaveCheckpointRequest(), timeout=120)
        assert read_state(checkpoint_path(tmp_path, 2)).ledger.plan_sha256 == plan_sha256(feeder.board.ledger()[1].plan)


@pytest.mark.night
def test_death_at_random_moments_changes_no_bit(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    moments = random.Random(0)
    steps = 8
    config = config_of(tiny_qwen3, every=1, steps=steps, micro_batch_tokens=24)
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        deaths = 0
        for step in range(1, steps + 1):
            feeder.feed(2, step - 1)
            if step in (3, 6):
                time.sleep(moments.uniform(0, 0.15))  # the moment is what is tested, not waited for
                os.kill(process.rank_pid(), signal.SIGKILL)
                deaths += 1
            coordinator.wait(lambda step=step: any(version == step for _, version in coordinator.announced))  # type: ignore[misc]
        # A step may have been committed just before the death: the next life announces it again.
        coordinator.wait(lambda: coordinator.announced[-1] == (1 + deaths, steps))
        disturbed = export(process, "model")
        plans = [entry.plan["groups"] for entry in feeder.board.ledger()]
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open, counts.dropped) == (2 * steps, 0, 0)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    url = redis_url.removesuffix("/0") + "/1"
    config = config_of(tiny_qwen3, every=0, steps=steps, micro_batch_tokens=24)
    with trainer_service(config, url, undisturbed) as (coordinator, feeder, process):
        train_to(coordinator, feeder, 1, 1, steps)
        assert [entry.plan["groups"] for entry in feeder.board.ledger()] == plans
        assert weights(export(process, "model")) == weights(disturbed)


@pytest.mark.slow
def test_two_ranks_write_and_read_one_checkpoint(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = config_of(tiny_qwen3, ranks=2, tensor_parallel=2)
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        # Where nothing can be written, training goes on, and who asked is told.
        checkpoints_folder(tmp_path).write_text("in the way")
        train_to(coordinator, feeder, 1, 1, 2)
        request = trainer_pb2.TrainerSaveCheckpointRequest()
        with pytest.raises(grpc.RpcError, match="can't be created"):
            process.trainer.SaveCheckpoint(request, timeout=120)
        checkpoints_folder(tmp_path).unlink()
        path = Path(process.trainer.SaveCheckpoint(request, timeout=120).path)
        assert path == checkpoint_path(tmp_path, 2)
        at_2 = export(process, "at-2")
        train_to(coordinator, feeder, 1, 3, 3)
        verify(path)
        assert (path / "rank-00000-0.safetensors").exists()
        assert (path / "rank-00001-0.safetensors").exists()
        assert (path / MANIFEST).exists()
        before = export(process, "before")
        kill_and_wait(coordinator, process, 2, 3)
        assert weights(export(process, "after")) == weights(before)
        recorded = feeder.board.ledger()[2].metrics
    # Without any service: the step once more on two ranks, and the checkpoint's model by one.
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, **recorded}) + "\n")
    result = run_checkpoints.replay_step(tmp_path, 3)
    assert result["start"] == "the checkpoint of step 2"
    for name, numbers in result["numbers"].items():
        assert numbers["replayed"] == numbers["recorded"] == recorded[name], name
    assert run_checkpoints.export_model(tmp_path, 2, tmp_path / "alone") == {"path": str(tmp_path / "alone"), "step": 2}
    assert weights(tmp_path / "alone") == weights(at_2)
