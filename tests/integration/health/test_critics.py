"""Two critics of a run, of which one works: the other takes over, and the run fails once neither can start.

When that happens is in tests/unit/coordinator/test_health_policy.py.
"""

import pytest

from relaxd.roles import CRITIC
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.replica_pb2 import REPLICA_STATE_IDLE, REPLICA_STATE_READY
from tests.integration.health.kit import FAILED, HEALTHY, QUICK, HealthCluster

SETTINGS = {
    **QUICK,
    "run__steps": 100000,
    "algorithm__name": "ppo",
    "algorithm__old_logprobs": "current",
    "roles.critic__placement": "service",
    "health__stuck_seconds": 60.0,
    "health__failed_seconds": 1.0,
    "health__max_restarts": 1,
    "health__max_rebuilds": 0,
}


@pytest.mark.slow
def test_the_other_critic_takes_over_and_the_run_fails_once_none_can_start(cluster: HealthCluster) -> None:
    cluster.supervisor({"trainer": 1, "rollout": 1, "reward": 1, "advantage": 1, "critic": 2})
    cluster.start_when_up("run", **SETTINGS)
    cluster.until_step(1)
    names = ("critic-1", "critic-2")
    both = {REPLICA_STATE_READY, REPLICA_STATE_IDLE}  # the second may register long after the first has begun to work
    cluster.until("both critics", lambda: {cluster.info(name).status.state for name in names} == both)
    status = {name: cluster.info(name).status for name in names}
    first = next(name for name, one in status.items() if one.state == REPLICA_STATE_READY)
    (second,) = status.keys() - {first}
    assert status[second].state == REPLICA_STATE_IDLE
    detail = f"it stands by, and takes over from {first}: run run takes no more than 1 critic"
    cluster.until("the other critic stands by", lambda: cluster.info(second).status.detail == detail)  # once it is told

    cluster.process(first).kill()
    cluster.until("the other critic", lambda: cluster.info(second).status.state == REPLICA_STATE_READY)
    cluster.until_event(first, HEALTHY, f"{first}-r1 stands by")
    cluster.goes_on()

    for name in status:
        cluster.fault("refuse", name)
    cluster.process(second).kill()
    run = cluster.until_state(pb.RUN_STATE_FAILED)
    assert run.reason.startswith(
        "critic could not be rebuilt: it has failed: run run did not start: FileNotFoundError: "
    )
    assert "model.safetensors is gone" in run.reason
    assert [event.state for event in cluster.events() if event.role == CRITIC and not event.instance] == [FAILED]
