"""Health: detection of problems, back-off of restarts, rebuilds of roles."""

import pytest

from relaxd.config import DataConfig, HealthConfig, ModelConfig, RewardConfig, RunConfig, RunSection
from relaxd.roles import JUDGE, REWARD, ROLLOUT, TRAINER
from relaxd.v1 import replica_pb2 as pb
from relaxd.v1.coordinator_pb2 import Registration
from services.coordinator.fleet.registry import Replica
from services.coordinator.health.detection import HealthIssue, HealthSignals
from services.coordinator.health.policy import HealthUpdate, RestartMode, RoleReconciler, RoleSigns, next_restart
from services.coordinator.state.records import KEPT_EVENTS, Health, HealthRecord, ReplicaHealth, RoleHealth
from services.coordinator.weights.gpu_handoff import HandoffFailure

READY, STARTING, FAILED = pb.REPLICA_STATE_READY, pb.REPLICA_STATE_STARTING, pb.REPLICA_STATE_FAILED


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_signs(
    clock: Clock,
    failures: int = 0,
    handoff: tuple[HandoffFailure, bool] | None = None,
    error: str = "",
    refusal: str = "",
    **health: float,
) -> HealthSignals:
    config = RunConfig(
        run=RunSection(steps=1),
        model=ModelConfig(path="model"),
        data=DataConfig(source="addition"),
        reward=RewardConfig(name="addition", timeout_seconds=10.0),
        health=HealthConfig(stuck_seconds=100.0, **health),
    )
    return HealthSignals(
        config,
        1.0,
        sync_failures=lambda replica: failures,
        sync_refusal=lambda replica: refusal,
        sync_error=lambda: error,
        handoff_failure=lambda replica: handoff,
        clock=clock,
    )


def replica(clock: Clock, role: str, **status: object) -> Replica:
    registration = Registration(replica_id="one", role=role)
    return Replica(registration, 5.0, seen=clock.now, status=pb.ReplicaStatus(**status))


def after(
    clock: Clock, seconds: float, signs: HealthSignals, one: Replica, **status: object
) -> tuple[str, bool] | None:
    """Return the issue (text, due) after `seconds` and a heartbeat with this status."""
    clock.now += seconds
    one.seen = clock.now
    for name, value in status.items():
        setattr(one.status, name, value)
    issue = signs.issue(one)
    return (issue.text, issue.due) if issue else None


def test_a_replica_with_groups_and_no_progress_is_stuck(clock: Clock) -> None:
    signs = make_signs(clock)
    one = replica(clock, REWARD, state=READY, held_groups=2, progress=7)
    assert after(clock, 0, signs, one) is None
    assert after(clock, 50, signs, one) is None
    suspect = after(clock, 10, signs, one)  # the limit is 100 s plus the reward's own timeout of 10 s
    assert suspect == ("it is stuck: it holds 2 groups and has made no progress for 60 s", False)
    assert after(clock, 45, signs, one, progress=8) is None
    assert after(clock, 200, signs, one, held_groups=0) is None
    assert after(clock, 200, signs, one, held_groups=1) is not None
    assert after(clock, 0, signs, one, progress=0) is None  # another engine counts from 0
    due = after(clock, 111, signs, one)
    assert due is not None
    assert due[1]
    signs.reset_timers()
    assert after(clock, 0, signs, one) is None


def test_an_engine_that_fails_synchronisations_can_also_be_stuck(clock: Clock) -> None:
    signs = make_signs(clock, failures=1)
    one = replica(clock, ROLLOUT, state=READY, held_groups=2, progress=7)
    one.status.weights.version = 3
    failed = ("1 weight synchronisations in a row failed with it", False)
    assert after(clock, 0, signs, one) == failed
    assert after(clock, 70, signs, one) == failed
    due = after(clock, 100, signs, one)  # past the weights' timeouts as well
    assert due == ("it is stuck: it holds 2 groups and has made no progress for 170 s", True)


def test_failed_synchronisations_are_told_with_the_last_error(clock: Clock) -> None:
    signs = make_signs(clock, failures=3, error="rollout-0: INVALID_ARGUMENT: manifest: no lm_head.weight")
    found = after(clock, 0, signs, replica(clock, ROLLOUT, state=READY))
    assert found is not None
    assert found[0] == (
        "3 weight synchronisations in a row failed with it: rollout-0: INVALID_ARGUMENT: manifest: no lm_head.weight"
    )


def test_a_trainer_must_progress_even_without_groups(clock: Clock) -> None:
    signs = make_signs(clock)
    one = replica(clock, TRAINER, state=READY, held_groups=0, progress=7)
    assert after(clock, 0, signs, one) is None
    assert after(clock, 300, signs, one, progress=8) is None
    due = after(clock, 100 + 121, signs, one)  # trainer.collective_timeout_seconds = 120
    assert due is not None
    assert due[1]


@pytest.mark.parametrize("given_up", [False, True])
def test_a_judge_that_never_wakes_up_is_restarted_once_it_is_given_up(clock: Clock, given_up: bool) -> None:
    failure = HandoffFailure("wake up", "out of memory", began=clock.now - 361, ended=clock.now)
    signs = make_signs(clock, handoff=(failure, given_up))
    found = after(clock, 0, signs, replica(clock, JUDGE, state=READY))
    assert found == ("it has not been able to wake up for 361 s: out of memory", given_up)


def test_a_refused_start_is_due_at_once_and_no_restart_helps(clock: Clock) -> None:
    signs = make_signs(clock, failed_seconds=10)
    one = replica(clock, TRAINER, state=FAILED, detail="no such model", start_refused=True)
    assert signs.issue(one) == HealthIssue("it has failed: no such model", due=True, final=True)


def test_start_and_failure_have_time_limits(clock: Clock) -> None:
    signs = make_signs(clock, start_seconds=60, failed_seconds=10)
    one = replica(clock, TRAINER, state=STARTING, detail="loading")
    assert after(clock, 0, signs, one) is None
    assert after(clock, 29, signs, one) is None
    assert after(clock, 30, signs, one, detail="replaying step 1") is None  # progress
    assert after(clock, 40, signs, one) == ("it has been starting for 40 s: replaying step 1", False)
    assert after(clock, 21, signs, one) == ("it has been starting for 61 s: replaying step 1", True)
    assert after(clock, 0, signs, one, state=FAILED, detail="no disk") == ("it has failed: no disk", False)
    assert after(clock, 11, signs, one) == ("it has failed: no disk", True)
    assert after(clock, 0, signs, one, state=READY) is None


def test_late_heartbeats_and_failed_synchronisations(clock: Clock) -> None:
    one = replica(clock, ROLLOUT, state=READY)
    assert after(clock, 0, make_signs(clock, failures=3), one) == (
        "3 weight synchronisations in a row failed with it",
        False,
    )
    assert after(clock, 0, make_signs(clock, failures=4), one) == (
        "4 weight synchronisations in a row failed with it",
        True,
    )
    refuses = HealthIssue("it refuses the trainer's weights: no lm_head", due=True, final=True)
    assert make_signs(clock, failures=1, refusal="no lm_head").issue(one) == refuses
    clock.now += 3.5
    issue = make_signs(clock).issue(one)
    assert issue is not None
    assert (issue.text, issue.due) == ("no heartbeat for 3.5 s", False)
    one.draining = True
    assert make_signs(clock, failures=9).issue(one) is None


def test_restarts_back_off() -> None:
    config = HealthConfig(first_backoff_seconds=2.0, max_restarts=4, restart_window_seconds=600.0)
    now = 1e9
    assert next_restart((), config, now) == 0.0
    assert next_restart((now - 601,), config, now) == 0.0
    assert next_restart((now,), config, now) == now + 2
    assert next_restart((now - 30, now - 10, now), config, now) == now + 8
    assert next_restart((now - 100, now - 30, now - 10, now), config, now) == now + 500
    # No window has more than max_restarts.
    restarts: tuple[float, ...] = ()
    moment = now
    while moment < now + 60:
        if moment >= next_restart(restarts, config, moment):
            restarts = (*restarts, moment)
        moment += 0.5
    assert len(restarts) == 4


def test_tries_count_until_the_replica_makes_progress() -> None:
    one = ReplicaHealth(instance="rollout-1", role="rollout", replica_id="rollout-1", seen_working=True, tries=2)
    draft = HealthUpdate(HealthRecord(replicas={"rollout-1": one}), now=5.0)
    draft.restart(one, "it is stuck")
    draft.restart(draft.replicas["rollout-1"], "it is stuck", RestartMode.FORCE)
    after = draft.result().replicas["rollout-1"]
    assert (after.state, after.tries, len(after.restarts), after.stopped_id) == (Health.RESTARTING, 2, 2, "rollout-1")
    assert after.down_since == 5.0
    assert [order.mode for order in draft.restarts] == [RestartMode.REQUEST, RestartMode.FORCE]
    for _ in range(2 * KEPT_EVENTS):
        draft.add_event("rollout", "rollout-1", Health.HEALTHY, "works")
    kept = draft.result().events
    assert (len(kept), kept[-1].number) == (KEPT_EVENTS, 2 * KEPT_EVENTS + 2)
    assert HealthRecord.model_validate_json(draft.result().model_dump_json()) == draft.result()


def test_consecutive_rebuilds_share_one_pause() -> None:
    tier = RoleReconciler(HealthConfig(first_backoff_seconds=0.0, max_rebuilds=3), clock=lambda: 1000.0)
    gone = ReplicaHealth(instance="one", role="reward", replica_id="one", state=Health.FAILED, reason="it died")
    record = HealthRecord(replicas={"one": gone})
    seen = []
    for missing in (("reward",), ("reward",), (), ("reward",)):
        draft = HealthUpdate(record, now=1000.0)
        tier.update(draft, "reward", {}, RoleSigns(missing, last_step=3))
        record = draft.result()
        role = record.roles["reward"]
        seen.append((role.state, role.rebuilds, role.pause))
    first, third = "rebuilding reward (1 of 3): it died", "rebuilding reward (3 of 3): it died"
    rebuilding = Health.REBUILDING
    assert seen == [(rebuilding, 1, first), (rebuilding, 2, first), (Health.HEALTHY, 2, first), (rebuilding, 3, third)]


def test_a_clock_that_was_set_back_puts_nothing_off() -> None:
    """The coordinator before had a clock that was days ahead."""
    now, ahead = 1e9, 1e9 + 40 * 86400
    failed = ReplicaHealth(instance="rollout-1", role="rollout", replica_id="rollout-1", state=Health.FAILED)
    failed = failed.model_copy(update={"since": ahead, "down_since": ahead, "restarts": (now - 5, ahead, ahead + 9)})
    role = RoleHealth(role="rollout", since=ahead)
    record = HealthRecord(replicas={"rollout-1": failed}, roles={"rollout": role}).with_reset_timers(now)
    one = record.replicas["rollout-1"]
    assert (one.since, one.down_since, one.restarts, record.roles["rollout"].since) == (now, now, (now - 5,), now)
