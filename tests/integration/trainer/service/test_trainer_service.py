"""The trainer service as a real process: it trains, commits, announces, and survives the death of its ranks."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from safetensors.numpy import load_file

from relaxd.v1 import coordinator_pb2
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED
from services.trainer.batch.step_plan import read_committed, step_file_path
from tests.integration.trainer.service_kit import error_code, export, make_config, trainer_service
from tests.kit.boards import kept_samples
from tests.kit.models import make_tiny_model
from tests.kit.waiting import wait_until


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3") / "model", architecture="qwen3")


def same_weights(one: Path, other: Path) -> bool:
    """Whether two exports are the same, bit for bit."""
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_trains_a_run_on_policy_and_ends_cleanly(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = make_config(tiny_qwen3, board={"max_staleness": 0}, algorithm={"kl_coef": 0.1})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        coordinator.wait_for_version(1, 0)
        for step in (1, 2, 3):
            feeder.feed(2, step - 1)
            coordinator.wait_for_version(1, step)
        ledger = feeder.board.ledger()
        assert [entry.plan["groups"] for entry in ledger] == [["g1", "g2"], ["g3", "g4"], ["g5", "g6"]]
        for entry in ledger:
            file = read_committed(tmp_path, entry.step, entry.plan)
            assert list(file.plan.groups) == entry.plan["groups"]
            expected = {"loss", "grad_norm", "lr", "reward_mean", "reward_accuracy", "reward_format", "staleness_max"}
            expected |= {
                "logprob_difference",
                "kl",
                "entropy",
                "clip_fraction",
                "tokens",
                "step_seconds",
                "wait_seconds",
            }
            assert expected <= entry.metrics.keys()
            assert entry.metrics["reward_mean"] == 0.5
            assert entry.metrics["staleness_max"] == 0
        samples = kept_samples(feeder.board, 3, 100)
        assert {sample["group_id"] for sample in samples} == {"g5", "g6"}
        shown = ParseDict(samples[0], coordinator_pb2.TrainedSample())
        assert (shown.step, shown.prompt, shown.version, shown.length) == (3, "prompt 5", 2, 6)
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open) == (6, 0)
        coordinator.wait(lambda: "all 3 steps are done" in coordinator.status.detail)
        assert coordinator.status.weights.version == 3
        assert coordinator.status.done_groups == 6
        assert not same_weights(export(process, "model"), tiny_qwen3)
        for folder in ("", ".", "/tmp/x", "../x", "a/../../x", "steps"):
            assert error_code(partial(export, process, folder)) is grpc.StatusCode.INVALID_ARGUMENT, folder
        assert step_file_path(tmp_path, 3).exists()
        assert process.stop() == 0


@pytest.mark.slow
def test_killed_rank_is_replaced_once_its_step_files_are_intact(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    # Several rounds a step, which the replay has to repeat.
    config = make_config(tiny_qwen3, trainer={"micro_batch_tokens": 12})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        feeder.feed(2, 1)
        coordinator.wait_for_version(1, 2)
        assert len(feeder.board.ledger()[0].plan["mini_batches"][0]["rounds"]) > 1
        before = export(process, "before")
        feeder.feed(1, 2)
        coordinator.wait(lambda: "step 3: 1 groups" in coordinator.status.detail)
        path = step_file_path(tmp_path, 2)
        intact = path.read_bytes()
        path.write_bytes(intact[:-10])
        os.kill(process.rank_pid(), signal.SIGKILL)
        coordinator.wait_for_detail("killed by signal 9")
        coordinator.wait_for_detail("step-000002.safetensors is damaged")
        path.write_bytes(intact)
        term = coordinator.wait(lambda: coordinator.announced[-1][0] > 1 and coordinator.announced[-1][0])
        coordinator.wait_for_version(term, 2)
        after = export(process, "after")
        assert same_weights(before, after)
        assert not same_weights(before, tiny_qwen3)
        feeder.feed(1, 2)
        coordinator.wait_for_version(term, 3)
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open, counts.dropped) == (6, 0, 0)
        assert feeder.board.ledger()[-1].plan["term"] == term


def test_waits_for_due_groups_and_drops_stale_ones(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = make_config(tiny_qwen3, run={"steps": 4}, board={"max_staleness": 1})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        # g3 was begun at version 0: at step 3 it would be too old, so step 2 keeps a place for it, and waits.
        feeder.publish()
        slow = feeder.begin(1, 0)
        feeder.feed(2, 1)
        coordinator.wait(
            lambda: coordinator.status.held_groups == 2 and "step 2: 1 groups" in coordinator.status.detail
        )
        feeder.finish(slow, 0)
        coordinator.wait_for_version(1, 2)
        assert set(feeder.board.ledger()[1].plan["groups"]) == {"g3", "g4"}
        assert feeder.board.ledger()[1].metrics["staleness_max"] == 1
        # Version 0 is too old for step 3.
        feeder.feed(1, 0)
        wait_until(lambda: feeder.board.counts().dropped_by_reason.get("stale") == 1)
        assert [retry.group_id for retry in feeder.board.retries()] == ["g6"]
        feeder.feed(1, 2)
        coordinator.wait_for_version(1, 3)
        assert set(feeder.board.ledger()[2].plan["groups"]) == {"g5", "g7"}
        # Paused: nothing closes. Groups that somebody else closes are not trained on.
        coordinator.set_state(coordinator_pb2.RUN_STATE_PAUSED)
        coordinator.wait(lambda: coordinator.status.detail == "paused")
        feeder.feed(2, 3)
        coordinator.set_state(coordinator_pb2.RUN_STATE_RUNNING)
        coordinator.wait_for_version(1, 4)
        assert process.stop() == 0


@pytest.mark.slow
def test_group_that_is_dropped_elsewhere_is_taken_out_of_the_step(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    config = make_config(tiny_qwen3, run={"steps": 1}, trainer={"micro_batch_tokens": 12})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        first, second = feeder.feed(1, 0), feeder.publish()
        coordinator.wait(lambda: "step 1: 1 groups" in coordinator.status.detail)
        assert feeder.board.drop_groups([first[0]], term=1, reason="stopped")
        slow = feeder.begin(1, 0)
        feeder.finish(slow, 0)
        third = feeder.feed(1, 0)
        coordinator.wait_for_version(1, 1)
        assert set(feeder.board.ledger()[0].plan["groups"]) == {*second, *third}
        trained = export(process, "model")
    again = tmp_path / "again"
    again.mkdir()
    with trainer_service(config, redis_url_of_another_run(redis_url), again) as (coordinator, feeder, process):
        feeder.publish()
        dropped = feeder.begin(1, 0)
        feeder.board.drop(dropped[0], reason="stopped")
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        # The gradients of the dropped group have left no trace.
        expected = load_file(export(process, "model") / "model.safetensors")
        for name, tensor in load_file(trained / "model.safetensors").items():
            assert abs(tensor - expected[name]).max() < 1e-6, name


def redis_url_of_another_run(redis_url: str) -> str:
    """Another database of the same server."""
    return redis_url.removesuffix("/0") + "/1"


def test_a_model_that_contradicts_itself_is_refused_at_once(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_qwen3, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e6}}
    (folder / "config.json").write_text(json.dumps(settings))
    with trainer_service(make_config(folder), redis_url, tmp_path) as (coordinator, _, _):
        coordinator.wait(lambda: coordinator.status.start_refused)
        assert coordinator.status.state == REPLICA_STATE_FAILED
        assert "ModelError: " in coordinator.status.detail
        assert "would rotate differently" in coordinator.status.detail
