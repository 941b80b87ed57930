"""Kills of the coordinator and of Redis at any moment: the run continues, without losses or duplicates."""

import io
import json
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from relaxd.board import Board, stages_for
from relaxd.cli.main import app
from relaxd.cli.reading.follow import follow
from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.config import RunConfig
from relaxd.run_folder import closed_groups, newest_samples
from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import PATIENCE, Cluster
from tests.kit.boards import all_steps
from tests.kit.processes import start_python
from tests.kit.redis.redis_server import RedisServer
from tests.kit.tokenizer import write_tokenizer
from tests.kit.waiting import wait_until

STOPPED = pb.RUN_STATE_STOPPED


def start_all(cluster: Cluster, faults: dict[str, dict[str, str]] | None = None) -> None:
    cluster.judges()
    cluster.trainer(faults=faults, PEER_STEP_SECONDS="0.2")
    cluster.rollout("rollout-1")
    cluster.rollout("rollout-2")


def trained_prompts(cluster: Cluster, run: pb.Run) -> list[str]:
    """Return the prompt of every trained group, in order, from the ledger."""
    config = RunConfig.model_validate_json(run.config_json)
    board = Board(cluster.redis_url, run.run_id, stages_for(config), config.board)
    board.counts().check()
    texts = [text for entry in all_steps(board, run.folder) for text in entry.plan["texts"]]
    board.close()
    return texts


@pytest.mark.night
def test_a_coordinator_that_is_killed_again_and_again(cluster: Cluster) -> None:
    start_all(cluster)
    cluster.start_when_up("run", run__steps=15, eval__prompts=5)
    moments = random.Random(7)
    for number in range(4):
        time.sleep(moments.uniform(0.0, 1.5))  # anywhere: starting, gathering, evaluating, publishing, synchronising
        cluster.kill("coordinator")
        cluster.coordinator()
        cluster.until("the coordinator", lambda: cluster.run() is not None)
        assert f"term {number + 2}" in cluster.log("coordinator")
    run = cluster.until_state(STOPPED)
    assert (run.reason, run.step) == ("completed", 15)
    assert (run.groups.published, run.groups.trained, run.groups.open) == (60, 60, 0), run.groups
    texts = trained_prompts(cluster, run)
    assert len(set(texts)) == len(texts) == 60
    lines = [json.loads(line) for line in (Path(run.folder) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(16))
    assert {"eval_accuracy"} <= lines[0].keys() & lines[15].keys()
    for name in ("trainer", "rollout-1", "rollout-2"):
        ids = [call["sync_id"] for call in cluster.calls(name) if "sync_id" in call]
        assert ids == sorted(ids)


@pytest.mark.slow
def test_who_follows_a_run_waits_for_a_coordinator_that_restarts(cluster: Cluster) -> None:
    start_all(cluster)
    cluster.start_when_up("run", run__steps=12)
    with CoordinatorClient(f"127.0.0.1:{cluster.port}") as client, ThreadPoolExecutor() as pool:
        following = pool.submit(follow, client, "run", Console(file=io.StringIO()))
        cluster.until_step(2)
        cluster.kill("coordinator")
        with pytest.raises(CliError, match="no coordinator answers"):
            client.samples("run")
        waiting = pool.submit(client.samples, "run", patience_seconds=120.0)
        assert wait([waiting], timeout=0.5).not_done
        cluster.coordinator()
        assert waiting.result(120)
        view = following.result(120)
    assert (view.run.state, view.run.step) == (STOPPED, 12)
    assert view.samples


@pytest.mark.slow
def test_a_coordinator_that_is_killed_in_a_synchronisation_aborts_it_and_begins_anew(cluster: Cluster) -> None:
    start_all(cluster, {"BroadcastWeights": {"2": "stall"}})  # it doesn't end before the kill
    cluster.start_when_up("run", run__steps=3, weights__timeout_seconds=120.0)
    cluster.until("a broadcast", lambda: len(cluster.calls("trainer", "BroadcastWeights")) == 2)
    cut = cluster.calls("trainer", "BroadcastWeights")[-1]
    cluster.kill("coordinator")
    cluster.coordinator()
    cluster.until("another broadcast", lambda: len(cluster.calls("trainer", "BroadcastWeights")) >= 3)
    later = [call for call in cluster.calls("trainer") if call["time"] > cut["time"] and "sync_id" in call]
    assert (later[0]["method"], later[0]["group"]) == ("LeaveWeightGroup", cut["group"])
    again = cluster.calls("trainer", "BroadcastWeights")[2]
    assert again["sync_id"] > later[0]["sync_id"] > cut["sync_id"]
    assert again["version"] >= cut["version"]
    assert again["group"] != cut["group"]
    run = cluster.until_state(STOPPED)
    assert (run.step, run.groups.open) == (3, 0)


def test_a_second_coordinator_takes_over_and_the_first_ends(cluster: Cluster) -> None:
    start_all(cluster)
    cluster.start_when_up("run", run__steps=10)
    cluster.until_step(1)
    cluster.start("second", "services.coordinator", "--port", "0")
    first = cluster.processes.pop("coordinator")
    assert first.wait(timeout=PATIENCE) == 1
    assert "newer coordinator" in cluster.log("coordinator")


@pytest.mark.slow
def test_a_coordinator_that_was_frozen_while_another_took_over_leaves_the_books_whole(cluster: Cluster) -> None:
    start_all(cluster)
    cluster.start_when_up("run", run__steps=12)
    metrics = Path(cluster.until_step(3).folder) / "metrics.jsonl"
    first, taken_over_by = cluster.processes["coordinator"], metrics.stat().st_ino
    cluster.send("coordinator", signal.SIGSTOP)
    cluster.start("second", "services.coordinator", "--port", "0")
    taken_over = "the second coordinator, which has read the folder"
    wait_until(lambda: metrics.stat().st_ino != taken_over_by, taken_over, PATIENCE)
    cluster.send("coordinator", signal.SIGCONT)
    assert first.wait(timeout=PATIENCE) == 1
    cluster.kill("second")
    cluster.coordinator()
    run = cluster.until_state(STOPPED)
    assert (run.reason, run.step) == ("completed", 12)
    closed = [line["group"] for line in closed_groups(metrics.parent)]
    assert len(closed) == len(set(closed)) == run.groups.trained + run.groups.dropped
    samples = [(line["step"], line["entry"]) for line in newest_samples(metrics.parent)]
    assert samples == [(step, f"{step}-{number}") for step in range(12, 0, -1) for number in range(3, -1, -1)]


def test_a_coordinator_that_was_replaced_ends_also_with_nothing_to_do(cluster: Cluster) -> None:
    """A superseded coordinator ends, so that it renews no more leases."""
    cluster.until("up", lambda: cluster.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
    cluster.start("next", "services.coordinator", "--port", "0")
    assert cluster.processes.pop("coordinator").wait(timeout=60) == 1
    assert "a newer coordinator has taken over this Redis" in cluster.log("coordinator")


@pytest.mark.slow
def test_redis_that_is_killed_in_the_middle(tmp_path: Path, redis_server: Callable[..., RedisServer]) -> None:
    redis = redis_server(append_only=True)
    cluster = Cluster(tmp_path, redis.url, write_tokenizer(tmp_path / "model"))
    try:
        cluster.coordinator()
        start_all(cluster)
        cluster.start_when_up("run", run__steps=12)
        cluster.until_step(3)
        redis.kill()
        time.sleep(1.0)
        redis.start()
        run = cluster.until_state(STOPPED)
        assert (run.step, run.groups.published, run.groups.open) == (12, 48, 0)
        assert len(set(trained_prompts(cluster, run))) == 48
    finally:
        cluster.close()


def test_redis_that_is_away_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.coordinator import __main__ as program

    monkeypatch.setattr(program, "REDIS_WAIT_SECONDS", 0.5)
    with pytest.raises(program.CannotStart, match=r"no Redis at 127\.0\.0\.1:1 within .* --redis / RELAXD_REDIS"):
        program.connect("redis://:secret@127.0.0.1:1/0")
    folder = tmp_path / "redis"
    folder.mkdir()
    redis = RedisServer(folder)  # not started yet
    cluster = Cluster(tmp_path, redis.url, write_tokenizer(tmp_path / "model"))
    try:
        cluster.coordinator()
        cluster.until("it waits", lambda: "waiting for Redis" in cluster.log("coordinator"))
        redis.start()
        cluster.until("it is up", lambda: cluster.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
    finally:
        cluster.close()
        redis.kill()


@pytest.mark.night
def test_resume_waits_for_a_coordinator_and_follows_the_run_to_its_end(cluster: Cluster) -> None:
    start_all(cluster)
    cluster.start_when_up("run", run__steps=4, eval__prompts=0)
    cluster.until_step(1)
    cluster.kill("coordinator")
    words = ("run", "--wait", "60", "--follow", "--coordinator", f"127.0.0.1:{cluster.port}")
    log = cluster.folder / "resume.log"
    resuming = start_python("-m", "relaxd.cli", "resume", *words, log=log, environment={"CI": "1"})
    cluster.processes["resume"] = resuming
    wait_until(lambda: "waiting up to 60 s for the coordinator" in log.read_text(), "it waits", explain=log.read_text)
    cluster.coordinator()
    assert resuming.wait(PATIENCE) == 0, log.read_text()
    assert "step 4/4" in log.read_text()

    again = CliRunner().invoke(app, ["resume", *words])  # such as by a job that is started once more
    assert (again.exit_code, again.output.startswith("run run is stopped: completed")) == (0, True), again.output
