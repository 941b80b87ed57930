"""First tier: a replica that is dead or stuck is restarted in place, and others get its groups at once.

When that happens, and how often, is in tests/unit/coordinator/test_health_policy.py.
"""

import re

import pytest

from tests.integration.health.kit import HEALTHY, RESTARTING, HealthCluster


@pytest.mark.slow
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
    event = cluster.until_event("rollout-2", RESTARTING, " weight synchronisations in a row failed with it")
    failures = re.search(r"(\d+) weight synchronisations", event.text)
    assert failures, event.text
    assert int(failures[1]) >= 2  # or more until that is looked at
    cluster.until_event("rollout-2", HEALTHY, "rollout-2-r1 works after")
    cluster.goes_on()
    assert [cluster.service(f"rollout-{number}").restarts for number in (1, 2)] == [1, 1]
    cluster.ended_run()


@pytest.mark.slow
def test_a_frozen_engine_is_killed_and_others_get_its_groups(cluster: HealthCluster) -> None:
    cluster.begin(rollouts=2, health__stuck_seconds=300.0)
    frozen = cluster.process("rollout-1")
    cluster.fault("stuck", "rollout-1", "rollout-1")
    cluster.until("it holds groups", lambda: cluster.info("rollout-1").status.held_groups)
    frozen.suspend()
    cluster.until_event("rollout-1", RESTARTING, "its heartbeats stopped")
    cluster.goes_on()  # by the groups that it holds; board.lease_seconds is longer than this waits
    cluster.until_event("rollout-1", HEALTHY, "rollout-1-r1 works after")
    assert not frozen.is_running()  # its launcher killed it: it could not answer
    assert "the coordinator requests a restart of rollout-1: killing it" in cluster.log("supervisor")
    cluster.ended_run()
