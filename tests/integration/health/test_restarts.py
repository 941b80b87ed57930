"""First tier: a replica that is dead or stuck is restarted in place, and others get its groups at once."""

import signal
import time
from itertools import pairwise

from tests.integration.health.kit import FAILED, HEALTHY, RESTARTING, SUSPECT, HealthCluster


def test_an_engine_that_is_stuck_or_answers_wrongly_is_restarted(cluster: HealthCluster) -> None:
    cluster.begin(rollouts=2, health__max_sync_failures=2)
    before = cluster.service("rollout-1")
    cluster.fault("stuck", "rollout-1", "rollout-1")
    event = cluster.until_event("rollout-1", RESTARTING, "it is stuck: it holds")
    assert "has made no progress for" in event.text
    cluster.until_event("rollout-1", HEALTHY, "rollout-1-r1 works after")
    after = cluster.service("rollout-1")
    assert (after.restarts, after.pid != before.pid) == (1, True)
    assert "exited with code 75, as requested" in cluster.log("supervisor")
    # What it held has gone to others, long before its hold would have ended.
    cluster.goes_on()
    health = cluster.health("rollout-1")
    assert (health.state, health.restarts, health.replica_id) == (HEALTHY, 1, "rollout-1-r1")

    cluster.fault("wrong", "rollout-2", "rollout-2")
    cluster.until_event("rollout-2", RESTARTING, "2 weight synchronisations in a row failed with it", 90)
    cluster.until_event("rollout-2", HEALTHY, "rollout-2-r1 works after")
    cluster.goes_on()
    assert [cluster.service(f"rollout-{number}").restarts for number in (1, 2)] == [1, 1]
    cluster.ended_run()


def test_only_a_stall_that_lasts_counts_as_death(cluster: HealthCluster) -> None:
    cluster.begin(rollouts=2, health__stuck_seconds=300.0)
    stalled = cluster.process("rollout-1")
    stalled.suspend()
    time.sleep(1.0)  # shorter than a lease
    stalled.resume()
    cluster.goes_on()
    assert cluster.events() == []

    # With it frozen, only others can bring the run on, by the groups that it holds.
    cluster.fault("stuck", "rollout-1", "rollout-1")
    cluster.until("it holds groups", lambda: cluster.info("rollout-1").status.held_groups)
    stalled.suspend()
    cluster.until_event("rollout-1", RESTARTING, "its heartbeats stopped")
    cluster.goes_on()
    cluster.until_event("rollout-1", HEALTHY, "rollout-1-r1 works after")
    assert not stalled.is_running()  # its launcher killed it: it could not answer
    assert "the coordinator requests a restart of rollout-1: killing it" in cluster.log("supervisor")
    cluster.ended_run()


def test_a_stuck_trainer_is_restarted_and_steps_continue(cluster: HealthCluster) -> None:
    cluster.begin()
    cluster.fault("stuck", "trainer-1", "trainer-1")
    cluster.until_event("trainer-1", RESTARTING, "it is stuck")
    step = cluster.run().step
    cluster.until_event("trainer-1", HEALTHY, "trainer-1-r1 works after")
    cluster.until_step(step + 2, 60)
    cluster.ended_run()


def test_a_death_is_an_event_and_frees_its_groups_at_once(cluster: HealthCluster) -> None:
    cluster.begin(health__stuck_seconds=300.0)
    cluster.fault("stuck", "rollout-1", "rollout-1")
    cluster.until("it holds groups", lambda: cluster.info("rollout-1").status.held_groups)
    cluster.process("rollout-1").kill()
    cluster.until_event("rollout-1", HEALTHY, "rollout-1-r1 works after")
    cluster.goes_on()  # board.lease_seconds is longer than this waits
    cluster.ended_run()


def test_a_new_coordinator_continues_a_restart(cluster: HealthCluster) -> None:
    cluster.begin(health__restart_timeout_seconds=10.0)
    # It dies for good, as far as its supervisor can tell: only the coordinator's insisting brings it back.
    fault = cluster.fault("fail", "reward-1")
    cluster.process("reward-1").kill()
    cluster.until_event("reward-1", RESTARTING)
    cluster.kill("coordinator")
    fault.unlink()
    cluster.coordinator("coordinator-2")
    cluster.until("a coordinator", lambda: cluster.run().state, 60)
    cluster.until_event("reward-1", HEALTHY, "works after", 90)
    cluster.goes_on()
    assert len({event.number for event in cluster.events()}) == len(cluster.events())
    cluster.ended_run()


def test_no_restart_storm(cluster: HealthCluster) -> None:
    # Stuck again after each restart; the other engine works, so the run goes on.
    cluster.begin(rollouts=2, health__max_restarts=3, health__stuck_seconds=0.5, health__first_backoff_seconds=0.5)
    cluster.fault("stuck", "rollout-1")
    gave_up = cluster.until_event("rollout-1", FAILED, "failed after 3 tries", 200)
    restarts = [event for event in cluster.events() if event.instance == "rollout-1" and event.state == RESTARTING]
    assert len(restarts) == 3
    times = [event.create_time.ToNanoseconds() for event in restarts]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap > 0.5e9 * 2**number for number, gap in enumerate(gaps)), gaps
    assert gave_up.time.ToNanoseconds() > restarts[-1].time.ToNanoseconds()
    cluster.goes_on()
    assert cluster.service("rollout-1").restarts == 3
    assert cluster.health("rollout").state == HEALTHY
    cluster.ended_run()


def test_unsupervised_replicas_are_not_restarted(cluster: HealthCluster) -> None:
    cluster.begin()
    cluster.rollout("by-hand", PEER_GENERATE_SECONDS="3600")
    cluster.until("it is suspect", lambda: cluster.health("by-hand").state == SUSPECT, 60)
    reason = cluster.until("it is stuck", lambda: _reason(cluster, "restart it by hand"), 60)
    assert "it is stuck" in reason
    assert cluster.processes["by-hand"].poll() is None
    cluster.send("by-hand", signal.SIGKILL)
    cluster.until_event("by-hand", FAILED, "by-hand is gone, and no supervisor restarts it")
    cluster.goes_on()
    cluster.ended_run()


def _reason(cluster: HealthCluster, words: str) -> str:
    reason = cluster.health("by-hand").reason
    return reason if words in reason else ""
