"""Whole runs with real processes; only trainer and engines are doubles."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis

from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import Cluster

PENDING, RUNNING, PAUSED = pb.RUN_STATE_PENDING, pb.RUN_STATE_RUNNING, pb.RUN_STATE_PAUSED
STOPPING, STOPPED, FAILED = pb.RUN_STATE_STOPPING, pb.RUN_STATE_STOPPED, pb.RUN_STATE_FAILED


def registered(cluster: Cluster, count: int) -> bool:
    return len(cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas) == count


def replicas(cluster: Cluster) -> list[pb.RegisteredReplica]:
    return list(cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas)


@pytest.fixture
def stack(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Everything that a run needs, idle before and after; several tests share it."""
    cluster = shared_cluster
    if "trainer" not in cluster.processes:
        cluster.judges()
        cluster.trainer()
        cluster.rollout("rollout-1")
        cluster.rollout("rollout-2")
    cluster.until("registrations", lambda: registered(cluster, 5))
    yield cluster
    with contextlib.suppress(grpc.RpcError):  # it has ended
        cluster.stub.StopRun(pb.StopRunRequest(), timeout=5)
    cluster.until("idle", lambda: all(not replica.status.run_id for replica in replicas(cluster)))


@pytest.mark.slow
def test_evaluations_beside_training(cluster: Cluster) -> None:
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.6")
    cluster.rollout("rollout-1")
    cluster.start_when_up("run", eval__prompts=20, eval__interval=3, run__steps=11)
    run = cluster.until_state(STOPPED)
    assert (run.reason, run.step) == ("completed", 11)
    folder = Path(run.folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(12))
    accuracy = {line["step"]: line["eval_accuracy"] for line in lines if "eval_accuracy" in line}
    # Before, after, and once in each interval: as soon as the engines have its weights, and it took no step's place.
    assert [step // 3 for step in accuracy] == [0, 1, 2, 3, 3]
    assert list(accuracy)[-1] == 11
    assert list(accuracy.values()) == sorted(accuracy.values())  # the doubles get better with each version
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["accuracy_after"], summary["notes"]) == (accuracy[11], [])


def test_a_run_from_start_to_end(stack: Cluster) -> None:
    cluster = stack
    engines = ("rollout-1", "rollout-2")
    earlier = {name: len(cluster.calls(name, "Generate")) for name in engines}
    started = cluster.start_run("first", eval__prompts=20, run__steps=6)
    assert (started.run_id, started.steps, started.state) == ("first", 6, PENDING)

    steps: list[pb.StepMetrics] = []
    token, state = "0", PENDING
    while state not in (STOPPED, FAILED):
        for message in cluster.stub.WatchRun(pb.WatchRunRequest(resume_token=token, max_seconds=3), timeout=60):
            steps += message.steps
            token, state = message.resume_token, message.run.state
            groups = message.run.groups
            assert groups.published == groups.open + groups.trained + groups.dropped
            if message.run.HasField("oldest_engine_version"):
                # The gate (steps are 4 groups, max_staleness is 1); a version may have risen since the publish.
                assert groups.published - groups.dropped <= 4 * (message.run.oldest_engine_version + 3)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]

    run = cluster.run("first")
    assert (run.state, run.reason, run.step) == (STOPPED, "completed", 6)
    assert run.outcome == pb.RUN_OUTCOME_COMPLETED
    assert run.create_time.ToNanoseconds() < run.end_time.ToNanoseconds() <= time.time_ns()
    assert (run.groups.published, run.groups.trained, run.groups.dropped, run.groups.open) == (24, 24, 0, 0)
    folder = Path(run.folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["in_flight"] == 0
    assert (summary["published"], summary["trained"], summary["dropped"], summary["steps"]) == (24, 24, 0, 6)
    # The doubles get a fifth of the sums right before training, and all of them at the end.
    assert 0 < summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] == 1.0
    assert summary["format_after"] == 1.0 > summary["format_before"]
    assert lines[0]["eval_accuracy"] == summary["accuracy_before"]
    assert lines[6]["eval_accuracy"] == summary["accuracy_after"] == run.metrics["eval_accuracy"]
    assert json.loads((folder / "model" / "config.json").read_text()) == {"version": 6}

    asked = [call for name in engines for call in cluster.calls(name, "Generate")[earlier[name] :]]
    assert len(asked) == 40
    assert {call["version"] for call in asked} == {0, 6}
    assert all(call["greedy"] for call in asked)

    request = pb.GetMetricsRequest(run_id="first", names=["step_seconds", "sync_bytes", "eval_accuracy", "pass_at_1"])
    series = {one.name: one for one in cluster.stub.GetMetrics(request, timeout=5).series}
    for name, one in series.items():
        assert dict(zip(one.steps, one.values, strict=True)) == {
            line["step"]: line[name] for line in lines if name in line
        }
    assert list(series["eval_accuracy"].steps) == [0, 6]
    assert list(series["pass_at_1"].steps) == [1, 2, 3, 4, 5, 6]
    assert sum(line.get("scored_groups", 0) for line in lines) == 24
    assert sum(series["sync_bytes"].values) > 0
    parts = ("sync_connect_seconds", "sync_pause_seconds", "sync_receive_seconds", "sync_resume_seconds")
    for line in lines[1:]:
        assert sum(line.get(part, 0.0) for part in parts) <= line["sync_seconds"] + 1e-6

    samples = cluster.stub.ListSamples(pb.ListSamplesRequest(page_size=3), timeout=5).samples
    assert [sample.step for sample in samples] == [6, 6, 6]
    assert samples[0].prompt.startswith("What is ")

    # The weight group lasts as long as its members do.
    groups = [call["group"] for call in cluster.calls("trainer", "BroadcastWeights")]
    assert len(set(groups[-6:])) == 1
    assert {call["group"] for call in cluster.calls("rollout-1", "ReceiveWeights")[-6:]} == {groups[-1]}
    # The next run begins on the same replicas.
    cluster.until("idle", lambda: all(not r.status.run_id for r in replicas(cluster)))
    cluster.start_run("second", run__steps=1)
    assert cluster.until_state(STOPPED).run_id == "second"
    assert [run.run_id for run in cluster.stub.ListRuns(pb.ListRunsRequest(page_size=2), timeout=5).runs] == [
        "second",
        "first",
    ]
    page = cluster.stub.ListRuns(pb.ListRunsRequest(page_size=1), timeout=5)
    request = pb.ListRunsRequest(page_size=1, page_token=page.next_page_token)
    (older,) = cluster.stub.ListRuns(request, timeout=5).runs
    whole = cluster.run("first")
    assert whole.metrics
    assert whole.config_json
    for field in ("metrics", "config_json", "health"):
        whole.ClearField(field)
    assert older == whole


def test_pause_resume_stop_and_start_again(stack: Cluster) -> None:
    cluster = stack
    cluster.start_run("long", run__steps=1000)
    cluster.until_step(2)

    paused = cluster.stub.PauseRun(pb.PauseRunRequest(reason="lunch"), timeout=5).run
    assert (paused.state, paused.reason) == (PAUSED, "lunch")
    cluster.until("nothing moves", lambda: quiet(cluster))
    before = cluster.run()
    assert not quiet(cluster, seconds=0.1) or cluster.run().step == before.step
    resumed = cluster.stub.ResumeRun(pb.ResumeRunRequest(run_id="long"), timeout=5).run
    assert resumed.state == RUNNING
    cluster.until_step(before.step + 2)

    cluster.stub.StopRun(pb.StopRunRequest(reason="seen enough"), timeout=5)
    run = cluster.until_state(STOPPED)
    assert (run.reason, run.outcome) == ("seen enough", pb.RUN_OUTCOME_STOPPED)
    assert run.groups.open == 0
    assert run.groups.published == run.groups.trained + run.groups.dropped
    assert set(run.groups.dropped_by_reason) <= {"run_ended"}
    summary = json.loads((Path(run.folder) / "summary.json").read_text())
    assert (summary["state"], summary["reason"], summary["in_flight"]) == ("stopped", "seen enough", 0)
    assert Path(summary["model"]).is_dir()


def quiet(cluster: Cluster, seconds: float = 0.5) -> bool:
    """Return whether no group moves for a while."""
    before = cluster.run()
    time.sleep(seconds)
    now = cluster.run()
    return (before.groups, before.step) == (now.groups, now.step)


def test_a_run_that_only_drops_pauses_itself_and_says_why(stack: Cluster) -> None:
    cluster = stack
    cluster.start_run(
        "broken", reward__name="tests.integration.coordinator.rewards:broken", board__max_consecutive_drops=5
    )
    run = cluster.until_state(PAUSED)
    assert "groups in a row failed without a trained step (board.max_consecutive_drops allows 5)" in run.reason
    assert "reward_failed" in run.reason
    assert "the last failure: tests.integration.coordinator.rewards:broken: " in run.reason
    assert "rewards.py:11, in broken)" in run.reason
    assert run.reason.endswith("once repaired: relaxd resume broken")
    assert run.groups.dropped_by_reason["reward_failed"] == run.groups.dropped > 5
    dropped = run.groups.dropped
    # A person who resumes has seen these: it takes as many again.
    cluster.stub.ResumeRun(pb.ResumeRunRequest(), timeout=5)
    cluster.until("more drops", lambda: cluster.run().groups.dropped > dropped + 5)
    cluster.until_state(PAUSED)


def test_a_run_whose_answers_are_all_cut_pauses_itself_and_names_the_setting(stack: Cluster) -> None:
    cluster = stack
    cluster.start_run(
        "cut",
        rollout__max_new_tokens=4,
        algorithm__drop_zero_variance=True,
        algorithm__mask_truncated=True,
        board__max_filtered_steps=1,
    )
    run = cluster.until_state(PAUSED)
    assert "groups in a row without a trained step (board.max_filtered_steps = 1 allows 4)" in run.reason
    assert run.reason.endswith("learns nothing from such answers: raise rollout.max_new_tokens")
    assert "too easy" not in run.reason
    assert run.groups.dropped_by_reason == {"all_truncated": run.groups.dropped}


def test_a_gap_between_engine_and_trainer_is_an_alarm_of_a_run_that_goes_on(stack: Cluster) -> None:
    cluster = stack
    cluster.start_run("gap", run__steps=1000)
    run = cluster.until("the alarm", lambda: (run := cluster.run()).alarms and run)
    (alarm,) = run.alarms
    assert (alarm.kind, alarm.first_step, run.state) == (pb.ALARM_KIND_LOGPROB_GAP, 1, RUNNING)
    assert "differ by 0.36 on average, more than 0.001 (the limit in float32)" in alarm.text
    assert cluster.log("coordinator").count(f"run gap: since step 1: {alarm.text}") == 1


@pytest.mark.slow
def test_a_run_whose_replicas_keep_failing_fails_with_their_reason(stack: Cluster) -> None:
    cluster = stack
    cluster.start_run("hopeless", reward__name="tests.integration.coordinator.rewards:missing")
    run = cluster.until_state(FAILED)
    assert run.reason.startswith("reward reward failed: ")
    assert run.outcome == pb.RUN_OUTCOME_REPLICAS_FAILED
    assert "missing" in run.reason
    summary = json.loads((Path(run.folder) / "summary.json").read_text())
    assert summary["state"] == "failed"
    # The next one may begin.
    cluster.start_run("hopeful", run__steps=1)
    cluster.until_state(STOPPED)


def test_ended_runs_are_deleted_when_asked(stack: Cluster) -> None:
    cluster = stack
    cluster.start_run("deleted", run__steps=1)
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub.DeleteRun(pb.DeleteRunRequest(run_id="deleted"), timeout=5)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    folder = Path(cluster.until_state(STOPPED).folder)
    client = redis.Redis.from_url(cluster.redis_url)
    assert client.keys("relaxd:*deleted*")
    cluster.stub.DeleteRun(pb.DeleteRunRequest(run_id="deleted"), timeout=5)
    assert not client.keys("relaxd:*deleted*")
    runs = cluster.stub.ListRuns(pb.ListRunsRequest(), timeout=5).runs
    assert "deleted" not in [run.run_id for run in runs]
    for call, request in ((cluster.stub.GetRun, pb.GetRunRequest), (cluster.stub.DeleteRun, pb.DeleteRunRequest)):
        with pytest.raises(grpc.RpcError) as caught:
            call(request(run_id="deleted"), timeout=5)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert (folder / "summary.json").is_file()


def test_a_run_waits_for_its_replicas_and_says_for_which(cluster: Cluster) -> None:
    cluster.start_when_up("early")
    run = cluster.until("a reason", lambda: (r := cluster.run()).reason and r)
    assert (run.state, run.reason) == (PENDING, "waiting for trainer, rollout, reward, advantage")
    cluster.judges()
    cluster.trainer()
    cluster.until("reason", lambda: cluster.run().reason == "waiting for rollout")
    cluster.rollout("rollout-1")
    cluster.until_state(STOPPED)


def test_a_wrong_row_of_a_large_file_fails_the_run_which_goes_on_once_it_is_repaired(
    stack: Cluster, tmp_path: Path
) -> None:
    """Of more than 20,000 rows only some are checked before a run: here those with even numbers."""
    rows = [json.dumps({"prompt": f"{number} + 1?", "answer": str(number + 1)}) for number in range(20_002)]
    rows[3] = json.dumps({"prompt": "6 + 1?", "answer": {"value": 7}})
    path = tmp_path / "large.jsonl"
    path.write_text("\n".join(rows))
    stack.start_run("large", data__source="files", data__path=str(path), data__shuffle=False, run__steps=100)
    failed = stack.until_state(FAILED)
    assert failed.outcome == pb.RUN_OUTCOME_DATA_FAILED
    assert f'data.path: {path} line 4: "answer" is an object with value' in failed.reason
    assert failed.reason.endswith("once the data are repaired: relaxd resume large --new-data")
    rows[3] = json.dumps({"prompt": "6 + 1?", "answer": "7"})
    path.write_text("\n".join(rows))
    request = pb.RestoreRunRequest(folder=failed.folder)
    with pytest.raises(grpc.RpcError, match="relaxd resume large --new-data"):
        stack.stub.RestoreRun(request, timeout=20)
    request.new_data = True
    assert not stack.stub.RestoreRun(request, timeout=20).run.HasField("end_time")
    assert not (Path(failed.folder) / "summary.json").exists()
    stack.until_step(1)
    stack.stub.StopRun(pb.StopRunRequest(), timeout=10)
    assert stack.until_state(STOPPED).groups.trained
