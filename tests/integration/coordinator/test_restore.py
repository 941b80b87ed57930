"""After the loss of Redis and all processes the run is restored from its folder; no prompt is trained twice."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from relaxd.board import Board, stages_for
from relaxd.config import RunConfig
from relaxd.config.load_toml import load_file
from relaxd.rpc.errors import from_call
from relaxd.run_folder import CONFIG, RECORD
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.runs.run_files import held_folder
from tests.integration.coordinator.cluster import Cluster


def start_all(cluster: Cluster, life: int) -> None:
    cluster.replica(f"reward-{life}", "services.reward")
    cluster.replica(f"advantage-{life}", "services.advantage")
    # The first life has to last until it is looked at.
    cluster.trainer(f"trainer-{life}", PEER_STEP_SECONDS="0.5" if life == 1 else "0.2")
    cluster.rollout(f"rollout-{life}")


def board_of(cluster: Cluster, run: pb.Run) -> Board:
    config = RunConfig.model_validate_json(run.config_json)
    return Board(cluster.redis_url, run.run_id, stages_for(config), config.board)


def write_checkpoint_state(cluster: Cluster, run: pb.Run) -> dict[str, Any]:
    """Write the checkpoint's state.json from the board, as the trainer does."""
    board = board_of(cluster, run)
    step, cursor = board.last_step(), board.cursor()
    counts, open_groups = board.counts(), board.open_groups()
    board.close()
    state = {
        "step": step,
        "term": 1,
        "board": {"cursor": cursor, "open_groups": open_groups, "dropped_by_reason": counts.dropped_by_reason},
    }
    folder = Path(run.folder) / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    return state


def lose_everything(cluster: Cluster) -> None:
    for name in list(cluster.processes):
        cluster.kill(name)
    with redis.Redis.from_url(cluster.redis_url) as client:
        client.flushall()


def refusal(cluster: Cluster, folder: object, steps: int = 0) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub.RestoreRun(pb.RestoreRunRequest(folder=str(folder), steps=steps), timeout=20)
    return caught.value


@pytest.mark.slow
def test_a_run_is_taken_up_from_its_folder(cluster: Cluster) -> None:
    start_all(cluster, 1)
    cluster.start_when_up("run", run__steps=12)
    run = cluster.until_step(3)
    assert "no trainer double" not in run.reason
    checkpoint = write_checkpoint_state(cluster, run)
    cluster.until_step(checkpoint["step"] + 2)
    ledger_file = Path(run.folder) / "ledger.jsonl"
    cluster.until("its ledger", lambda: len(ledger_file.read_text().splitlines()) > checkpoint["step"])
    cluster.stub.PauseRun(pb.PauseRunRequest(reason="looking"), timeout=10)  # the restored run goes on all the same
    refused = refusal(cluster, run.folder)
    assert (refused.code(), "is active" in refused.details()) == (grpc.StatusCode.FAILED_PRECONDITION, True)

    lose_everything(cluster)
    folder = Path(run.folder)
    lines = ledger_file.read_text().splitlines(keepends=True)
    ledger_file.write_text("".join(lines) + lines[-1][:40])  # it died while it wrote
    cluster.coordinator()
    cluster.until("the coordinator", lambda: cluster.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
    start_all(cluster, 2)
    assert "absolute" in refusal(cluster, "runs/run").details()
    assert "isn't the folder of a run" in refusal(cluster, cluster.folder).details()
    again = cluster.stub.RestoreRun(pb.RestoreRunRequest(folder=str(folder)), timeout=20).run
    assert (again.run_id, again.step) == ("run", len(lines))
    assert again.groups.open == 0
    done = cluster.until_state(pb.RUN_STATE_STOPPED)
    assert (done.step, done.groups.open, done.groups.trained) == (12, 0, 48)
    assert done.groups.published == done.groups.trained + done.groups.dropped
    board = board_of(cluster, done)
    ledger = board.ledger()
    board.close()
    texts = [text for entry in ledger for text in entry.plan["texts"]]
    assert len(set(texts)) == len(texts) == 48
    # What was under way when everything died was asked again before anything new.
    ids = {group.partition("~")[0] for entry in ledger for group in entry.plan["groups"]}
    assert ids == {f"0-{position:06d}" for position in range(48)}
    assert ledger[-1].term > 16  # above any trainer's that was left alive somewhere
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 12
    assert "has ended" in refusal(cluster, folder).details()

    # The ended run goes on with more steps, from its folder; Redis may still know it.
    assert [call["rotate"] for call in cluster.calls("trainer-2", "SaveCheckpoint")] == [True]
    assert "has done 12" in refusal(cluster, folder, steps=12).details()
    assert "must not be negative" in refusal(cluster, folder, steps=-1).details()
    extended = cluster.stub.RestoreRun(pb.RestoreRunRequest(folder=str(folder), steps=14), timeout=20).run
    assert (extended.steps, extended.step, extended.HasField("end_time")) == (14, 12, False)
    assert not (folder / "summary.json").exists()
    done = cluster.until_state(pb.RUN_STATE_STOPPED)
    assert (done.step, done.outcome, done.groups.trained) == (14, pb.RUN_OUTCOME_COMPLETED, 56)
    assert done.groups.published == done.groups.trained + done.groups.dropped
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert len({text for line in lines for text in line["plan"]["texts"]}) == 56
    assert json.loads((folder / "config.json").read_text())["run"]["steps"] == 14
    assert load_file(folder / "config.toml").run.steps == 14


def test_a_run_that_another_stack_works_on_is_not_restored(cluster: Cluster, tmp_path: Path) -> None:
    cluster.until("the coordinator", lambda: cluster.stub.ListRuns(pb.ListRunsRequest()) is not None)
    for name in (RECORD, CONFIG):
        (tmp_path / name).write_text("{}")
    with held_folder(tmp_path, "theirs-2"):
        error = from_call(refusal(cluster, tmp_path))
    assert error.reason == "STACK_MISMATCH"
    assert "the coordinator of stack 'theirs-2' works on the run in" in error.message
    assert from_call(refusal(cluster, tmp_path)).reason == "INVALID_ARGUMENT"  # the files have no run


def test_a_run_that_another_stack_has_restored_is_not_resumed(cluster: Cluster) -> None:
    """The folder, with the record of the stack that works on it, stays as it is."""
    folder = Path(cluster.start_when_up("run").folder)
    cluster.until("its record", (folder / RECORD).exists)
    cluster.kill("coordinator")
    with held_folder(folder, "theirs-2"):
        files = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        cluster.coordinator()
        run = cluster.until_state(pb.RUN_STATE_FAILED)
        assert run.outcome == pb.RUN_OUTCOME_FOLDER_HELD
        assert "after a restart: stack 'theirs-2' works on the run in" in run.reason
        assert files == {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert (
        cluster.stub.RestoreRun(pb.RestoreRunRequest(folder=str(folder)), timeout=20).run.state == pb.RUN_STATE_PENDING
    )
