"""Second tier: a role without a working replica is rebuilt while the run is paused; then the run fails.

When that happens is in tests/unit/coordinator/test_health_policy.py.
"""

import pytest

from relaxd.roles import ROLLOUT
from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.health.kit import FAILED, HEALTHY, REBUILDING, RESTARTING, HealthCluster

SHORT = {
    "health__restart_timeout_seconds": 4.0,
    "health__max_restarts": 1,
    "health__role_timeout_seconds": 60.0,
    "health__max_rebuilds": 2,
}


@pytest.mark.slow
def test_a_role_that_never_comes_back_fails_the_run_with_the_reason(cluster: HealthCluster) -> None:
    cluster.begin(max_restarts=1, **{**SHORT, "health__restart_timeout_seconds": 1.5})
    cluster.fault("fail", "rollout-1")
    cluster.process("rollout-1").kill()
    paused = cluster.until_state(pb.RUN_STATE_PAUSED)
    assert "rebuilding rollout (1 of 2)" in paused.reason
    # The trainer is well, and worse may follow.
    cluster.until("a checkpoint is saved", lambda: cluster.calls("trainer-1", "SaveCheckpoint"))
    run = cluster.until_state(pb.RUN_STATE_FAILED)
    assert run.reason.startswith("rollout could not be rebuilt: ")
    assert run.reason.endswith("(2 attempts)")
    events = cluster.events()
    kinds = [event.state for event in events if event.role == ROLLOUT and not event.instance]
    assert kinds == [REBUILDING, REBUILDING, FAILED], events


@pytest.mark.slow
def test_a_rebuilt_role_resumes_the_run(cluster: HealthCluster) -> None:
    cluster.begin(max_restarts=1, **{**SHORT, "health__restart_timeout_seconds": 6.0, "health__max_rebuilds": 10})
    fault = cluster.fault("fail", "trainer-1")
    cluster.process("trainer-1").kill()
    cluster.until_event("trainer", REBUILDING)
    cluster.until_state(pb.RUN_STATE_PAUSED)
    # Over a restart of the coordinator, too.
    cluster.kill("coordinator")
    fault.unlink()
    cluster.coordinator("coordinator-2")
    cluster.until_event("trainer", HEALTHY, "rebuilt after")
    cluster.until_state(pb.RUN_STATE_RUNNING)
    cluster.goes_on()
    assert cluster.until("no rebuild counts", lambda: cluster.health("trainer").restarts == 0)
    cluster.ended_run()


@pytest.mark.slow
def test_a_run_that_a_role_refuses_to_start_fails_at_once(cluster: HealthCluster) -> None:
    refusal = "run run did not start: InvalidArgument: rollout.sglang contradicts itself"
    fault = cluster.fault("invalid", "rollout-1")
    cluster.supervisor({"trainer": 1, "rollout": 1, "reward": 1, "advantage": 1})
    cluster.start_when_up("run", run__steps=100000)
    run = cluster.until_state(pb.RUN_STATE_FAILED)
    assert refusal in run.reason
    assert not [event for event in cluster.events() if event.state in (RESTARTING, REBUILDING)]

    fault.unlink()
    refusal = refusal.replace("run run", "run again")
    cluster.start_run("again", run__steps=100000)
    cluster.until_step(1)
    cluster.fault("invalid", "rollout-1")
    cluster.process("rollout-1").kill()
    run = cluster.until_state(pb.RUN_STATE_FAILED)
    assert run.reason.startswith(f"rollout can't start: it has failed: {refusal}")
    cluster.until_event("rollout-1", FAILED, refusal)
    assert not [event for event in cluster.events() if event.state == REBUILDING]
