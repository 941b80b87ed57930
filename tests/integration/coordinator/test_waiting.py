"""A run names its wait while its reward fails or hangs or its disk is full, and goes on without a loss."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.replica_pb2 import REPLICA_WAIT_SCORE
from tests.integration.coordinator.cluster import Cluster
from tests.kit.disks import full_disk, no_descriptors

PLACE = "tests/integration/coordinator/rewards.py:"


@pytest.mark.slow
def test_a_run_says_why_it_waits_for_its_reward(cluster: Cluster) -> None:
    told = cluster.folder / "told"
    told.write_text("raise")
    cluster.replica("reward", "services.reward", TOLD=str(told))
    cluster.replica("advantage", "services.advantage")
    cluster.trainer()
    cluster.rollout("rollout-1")
    cluster.start_when_up(
        "run",
        run__steps=15,
        board__max_consecutive_drops=5,
        board__max_staleness=0,
        reward__name="tests.integration.coordinator.rewards:as_told",
        reward__environment=["TOLD"],
        reward__timeout_seconds=60.0,
    )
    cluster.until_state(pb.RUN_STATE_PAUSED)
    paused = cluster.until("its reason", lambda: (run := cluster.run()).wait.kind == pb.WAIT_KIND_PAUSED and run)
    assert paused.waiting_for.startswith("it is paused and waits for a person: ")
    assert "groups in a row failed without a trained step" in paused.waiting_for
    assert f"ValueError: told to fail ({PLACE}" in paused.waiting_for
    assert paused.wait.advice[0] == "relaxd resume run continues it"
    scored = cluster.until(
        "the end of those that are being scored",
        lambda: (run := cluster.run()) and not next(one.held for one in run.queues if one.stage == "reward") and run,
    )
    assert scored.groups.dropped_by_reason["reward_failed"] >= 5

    told.write_text("hang")

    def hanging() -> list[str]:
        run = cluster.run()
        if run.state == pb.RUN_STATE_PAUSED:  # also again: a group may have failed since its replica's last heartbeat
            cluster.stub.ResumeRun(pb.ResumeRunRequest(), timeout=10)
        return [line for line in run.wait.evidence if "has been scoring" in line and PLACE in line]

    hangs = cluster.until("the reward that hangs", hanging)
    (reward,) = cluster.stub.ListReplicas(pb.ListReplicasRequest(role="reward"), timeout=5).replicas
    assert reward.status.wait == REPLICA_WAIT_SCORE
    failed = cluster.run().groups.dropped_by_reason["reward_failed"]
    assert "reward: ready, tests.integration.coordinator.rewards:as_told has been scoring a sample for" in hangs[0]
    assert f"(at {PLACE}" in hangs[0]
    assert "in as_told); its prompt: 'What is" in hangs[0]

    told.write_text("work")
    run = cluster.until_state(pb.RUN_STATE_STOPPED)
    assert (run.outcome, run.waiting_for) == (pb.RUN_OUTCOME_COMPLETED, "")
    lines = (Path(run.folder) / "ledger.jsonl").read_text().splitlines()
    trained = [group for line in lines for group in json.loads(line)["plan"]["groups"]]
    assert sum("~" in group for group in trained) == failed
    assert len({group.partition("~")[0] for group in trained}) == len(trained)


@pytest.mark.slow
@pytest.mark.parametrize(("limited", "error"), [(full_disk, "File too large"), (no_descriptors, "Too many open files")])
def test_a_run_waits_until_its_folder_can_be_written_to(
    cluster: Cluster, limited: Callable[..., AbstractContextManager[None]], error: str
) -> None:
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.3")  # the run is not to end before its folder refuses
    cluster.rollout("rollout-1")
    cluster.start_when_up("run", run__steps=24)
    cluster.until_step(1)
    coordinator = cluster.processes["coordinator"]
    with limited(pid=coordinator.pid):
        run = cluster.until("the wait", lambda: (run := cluster.run()).wait.kind == pb.WAIT_KIND_DISK and run)
        assert re.match(rf"it waits for the disk of {run.folder}, for run run: \[Errno \d+\] {error}", run.waiting_for)
        assert (run.wait.on, run.wait.advice[0].split(":")[0]) == (
            "the disk",
            "make room on the disk, or let the coordinator write to it",
        )
        # Nothing more is published: the trainer ends the steps whose groups are there, and the run stands still.
        still = cluster.until("the end of what is open", lambda: (run := cluster.run()).groups.open < 4 and run)
        assert run.step <= still.step < 24
        cluster.stub.PauseRun(pb.PauseRunRequest(reason="by hand"), timeout=20)  # commands don't wait for the disk
        cluster.until_state(pb.RUN_STATE_PAUSED)
        cluster.stub.ResumeRun(pb.ResumeRunRequest(), timeout=5)
        assert cluster.run().groups.published == still.groups.published
    run = cluster.until_state(pb.RUN_STATE_STOPPED)
    assert run.outcome == pb.RUN_OUTCOME_COMPLETED
    assert coordinator.poll() is None
    folder = Path(run.folder)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        assert [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()] == list(range(1, 25))
    groups = [json.loads(line)["group"] for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert len(groups) == len(set(groups)) == run.groups.trained + run.groups.dropped
    cluster.until("run.json", lambda: json.loads((folder / "run.json").read_text())["phase"] == "STOPPED")
