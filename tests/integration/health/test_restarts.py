"""First tier: a replica that is dead or stuck is restarted in place, and its work goes on elsewhere at once."""

from tests.integration.health.kit import HEALTHY, RESTARTING, HealthCluster


def test_a_stuck_engine_is_restarted(cluster: HealthCluster) -> None:
    cluster.begin(rollouts=2)
    before = cluster.service("rollout-1")
    cluster.fault("stuck", "rollout-1", "rollout-1")
    event = cluster.until_event("rollout-1", RESTARTING, "it is stuck: it holds")
    assert "has got nothing done for" in event.text
    cluster.until_event("rollout-1", HEALTHY, "rollout-1-r1 works after")
    after = cluster.service("rollout-1")
    assert (after.restarts, after.pid != before.pid) == (1, True)
    assert cluster.service("rollout-2").restarts == 0
    assert "exited with code 75, as it was told" in cluster.log("supervisor")
    # What it held has gone to others, long before its hold would have ended.
    cluster.goes_on()
    health = cluster.health("rollout-1")
    assert (health.state, health.restarts, health.replica_id) == (HEALTHY, 1, "rollout-1-r1")
    cluster.ended_run()
