"""Weight synchronisation when members come, die, freeze or stall: nothing hangs, and the trainer is never restarted."""

import signal
import time

import pytest

from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import Cluster

STOPPED = pb.RUN_STATE_STOPPED
MISFIT = {"JoinWeightGroup": {str(number): "misfit" for number in range(1, 100)}}
REFUSAL = "INVALID_ARGUMENT: the model has no lm_head.weight"


def begin(cluster: Cluster, steps: int, faults: dict[str, dict[str, str]] | None = None, **overrides: object) -> None:
    """Start a run with one healthy engine and one that may have faults."""
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.3")
    cluster.rollout("sound")
    cluster.rollout("other", faults)
    cluster.until("replicas", lambda: len(replicas(cluster)) == 5)
    cluster.start_run("run", run__steps=steps, **overrides)


def replicas(cluster: Cluster) -> list[str]:
    found = cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
    return [replica.registration.replica_id for replica in found]


def weights(cluster: Cluster) -> dict[str, int | None]:
    """Return the served version by engine."""
    engines = cluster.stub.GetWeights(pb.GetWeightsRequest(), timeout=5).engines
    return {e.replica_id: e.weights.version if e.HasField("weights") else None for e in engines}


def check_the_sequence(cluster: Cluster, members: tuple[str, ...] = ("trainer", "sound", "other")) -> None:
    """Ids ascend on every member; a group is joined before it is used; engines generate while they join, and are paused
    before they receive."""
    for name in members:
        calls = [call for call in cluster.calls(name) if "sync_id" in call]
        ids = [call["sync_id"] for call in calls]
        assert ids == sorted(ids), name
        joined: set[str] = set()
        for call in calls:
            if call["method"] == "JoinWeightGroup":
                assert call["group"] not in joined, "a group's name is never used again"
                joined.add(call["group"])
            if call["method"] in ("BroadcastWeights", "ReceiveWeights"):
                assert call["group"] in joined
        if name != "trainer":
            for received in (i for i, call in enumerate(calls) if call["method"] == "ReceiveWeights"):
                same = [call["method"] for call in calls[:received] if call["sync_id"] == ids[received]]
                assert same[-1] == "PauseGeneration"
                assert (
                    "PauseGeneration" not in same[: same.index("JoinWeightGroup") if "JoinWeightGroup" in same else 0]
                )
    received = [call["version"] for call in cluster.calls("sound", "ReceiveWeights")]
    assert received == sorted(received)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die", "freeze"])
def test_an_engine_that_dies_in_a_broadcast_does_not_stop_the_trainer(cluster: Cluster, fault: str) -> None:
    steps, limits = 6, {"weights__timeout_seconds": 8.0, "weights__connect_timeout_seconds": 4.0}
    begin(cluster, steps, {"ReceiveWeights": {"3": fault}}, **limits)
    trainer = cluster.processes["trainer"].pid
    cluster.until("the fault", lambda: len(cluster.calls("other", "ReceiveWeights")) == 3)
    step = cluster.run().step
    died = time.monotonic()
    cluster.until_step(min(step + 2, steps))
    assert time.monotonic() - died < 60
    run = cluster.until_state(STOPPED)
    assert (run.step, run.groups.open) == (steps, 0)
    assert cluster.processes["trainer"].pid == trainer
    assert cluster.processes["trainer"].poll() is None
    check_the_sequence(cluster)
    # The engine that was touched served nothing until it had everything.
    left = cluster.calls("sound", "LeaveWeightGroup")[0]
    again = next(call for call in cluster.calls("sound", "ReceiveWeights") if call["time"] > left["time"])
    assert again["group"] != left["group"]
    if fault == "freeze":  # it wakes up in a world that has gone on, and is taken in again
        cluster.send("other", signal.SIGCONT)
        cluster.until("other registers again", lambda: "other" in replicas(cluster))


@pytest.mark.slow
def test_an_engine_with_other_weights_than_were_sent_serves_nothing_until_it_has_them(cluster: Cluster) -> None:
    begin(cluster, steps=20_000, faults={"ReceiveWeights": {"1": "wrong"}})
    received = cluster.until("a second try", lambda: cluster.calls("other", "ReceiveWeights")[1:2])
    wrong = cluster.calls("other", "ReceiveWeights")[0]
    between = [c for c in cluster.calls("other") if wrong["time"] < c["time"] < received[0]["time"]]
    assert "ResumeGeneration" not in [call["method"] for call in between]
    assert received[0]["checksum"]
    cluster.until("both", lambda: None not in (w := weights(cluster)).values() and len(w) == 2)
    # Once compared, an engine is believed.
    cluster.until("a later one", lambda: not cluster.calls("sound", "ReceiveWeights")[-1]["checksum"])
    check_the_sequence(cluster)


@pytest.mark.slow
def test_an_engine_that_stalls_is_left_out_and_comes_back(cluster: Cluster) -> None:
    begin(cluster, steps=20_000, faults={"ReceiveWeights": {"3": "stall"}}, weights__timeout_seconds=2.0)
    cluster.until("the fault", lambda: len(cluster.calls("other", "ReceiveWeights")) >= 3)
    cluster.until("only sound", lambda: (w := weights(cluster))["sound"] is not None and w["other"] is None)
    cluster.until("both again", lambda: None not in (w := weights(cluster)).values() and len(w) == 2)
    check_the_sequence(cluster)


@pytest.mark.slow
def test_a_joiner_gets_weights_before_prompts(cluster: Cluster) -> None:
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.2")
    cluster.rollout("sound")
    cluster.start_when_up("run", run__steps=20_000)
    cluster.until_step(2)
    cluster.rollout("other")
    cluster.until("other works", lambda: done_groups(cluster, "other") > 0)
    first = cluster.calls("other", "ReceiveWeights")[0]
    assert first["version"] >= 2
    answer = cluster.stub.SyncWeights(pb.SyncWeightsRequest(), timeout=60)
    assert answer.weights.version >= first["version"]
    assert sorted(answer.replica_ids) == ["other", "sound"]
    check_the_sequence(cluster)
    # And one that leaves by itself is no failure: the group is built anew without it.
    cluster.send("other", signal.SIGTERM)
    assert cluster.processes["other"].wait(timeout=60) == 0
    step = cluster.run().step
    cluster.until_step(step + 3)


@pytest.mark.slow
def test_weights_are_sent_after_every_third_step_and_after_the_last(cluster: Cluster) -> None:
    """With the smallest max_staleness that an interval allows; the double refuses groups that are older."""
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.05")
    cluster.rollout("sound")
    cluster.start_when_up("run", run__steps=8, weights__interval=3, board__max_staleness=2)
    run = cluster.until_state(STOPPED)
    assert (run.step, run.groups.trained, run.groups.open) == (8, 32, 0)
    assert [call["version"] for call in cluster.calls("sound", "ReceiveWeights")] == [0, 3, 6, 8]
    check_the_sequence(cluster, ("trainer", "sound"))


@pytest.mark.slow
def test_a_joiner_does_not_wait_for_the_interval(cluster: Cluster) -> None:
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.2")
    cluster.rollout("sound")
    cluster.start_when_up("run", run__steps=2000, weights__interval=1000, board__max_staleness=999)
    cluster.until_step(2)
    cluster.rollout("other")
    first = cluster.until("other has weights", lambda: cluster.calls("other", "ReceiveWeights"))[0]["version"]
    assert first >= 2
    # Each engine is told on its own, so the other one may be told first.
    cluster.until("sound has them, too", lambda: len(cluster.calls("sound", "ReceiveWeights")) > 1)
    assert [call["version"] for call in cluster.calls("sound", "ReceiveWeights")][:2] == [0, first]
    cluster.until_step(first + 1)
    answer = cluster.stub.SyncWeights(pb.SyncWeightsRequest(), timeout=60)  # an operator doesn't wait for it, either
    assert answer.weights.version > first
    cluster.stub.StopRun(pb.StopRunRequest(reason="enough"), timeout=20)
    run = cluster.until_state(STOPPED)
    # The last step's weights are sent whatever the interval is.
    assert cluster.calls("sound", "ReceiveWeights")[-1]["version"] == run.step


def done_groups(cluster: Cluster, name: str) -> int:
    found = cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
    return sum(replica.status.done_groups for replica in found if replica.registration.replica_id == name)


@pytest.mark.slow
def test_a_trainer_that_is_killed_goes_on_under_a_new_term(cluster: Cluster) -> None:
    begin(cluster, steps=20)  # so many that the run doesn't end before the kill
    cluster.until_step(3)
    cluster.kill("trainer")
    cluster.trainer()
    run = cluster.until_state(STOPPED)
    assert (run.step, run.groups.trained, run.groups.open) == (20, 80, 0)
    terms = [call["term"] for call in cluster.calls("trainer", "commit_step")]
    assert terms == sorted(terms)
    assert set(terms) == {1, 2}


@pytest.mark.slow
def test_a_run_goes_on_without_an_engine_that_refuses_the_weights(cluster: Cluster) -> None:
    begin(cluster, steps=20_000, faults=MISFIT)
    cluster.until_step(2)
    assert len(cluster.calls("other", "JoinWeightGroup")) == 1, "it would refuse them again"
    run = cluster.until("the alarm", lambda: (run := cluster.run()).alarms and run)
    assert (run.state, run.alarms[0].name) == (pb.RUN_STATE_RUNNING, "rollout replicas")
    assert run.alarms[0].text.startswith("could not be brought back: other (it refuses the trainer's weights: ")
    assert REFUSAL in run.alarms[0].text


@pytest.mark.slow
def test_a_run_fails_if_all_engines_refuse_the_weights(cluster: Cluster) -> None:
    cluster.judges()
    cluster.trainer()
    cluster.rollout("other", MISFIT)
    cluster.until("replicas", lambda: len(replicas(cluster)) == 4)
    cluster.start_run("run", run__steps=5)
    run = cluster.until_state(pb.RUN_STATE_FAILED)
    assert run.outcome == pb.RUN_OUTCOME_REPLICAS_FAILED
    assert (run.failed_role, run.failed_instance) == ("rollout", "other")
    assert run.reason == f"no engine takes the trainer's weights: other refuses them: {REFUSAL}"
