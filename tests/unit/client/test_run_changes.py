"""WatchRun's changes: merged one after another, they give the run as it is."""

import random

from relaxd.client.run_changes import changes, merge
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HEALTH_STATE_HEALTHY, HEALTH_STATE_RESTARTING, Health
from tests.kit.cases import each


def some_run(chance: random.Random) -> pb.Run:
    """Return a run of which every part may be there, or not, or be empty."""
    run = pb.Run(run_id="r", step=chance.randrange(3), reason=chance.choice(["", "paused"]))
    run.config_json = chance.choice(["", "{}"])
    for name in "abc":
        if chance.random() < 0.5:
            run.metrics[name] = chance.randrange(2)
    for number in range(4):
        if chance.random() < 0.5:
            state = chance.choice([HEALTH_STATE_HEALTHY, HEALTH_STATE_RESTARTING])
            run.health.append(Health(role="rollout", instance=f"rollout-{number}", state=state))
    if chance.random() < 0.5:
        run.oldest_engine_version = chance.randrange(2)
    if chance.random() < 0.5:
        run.end_time.seconds = chance.randrange(2)  # 0: there, and empty
    if chance.random() < 0.5:
        run.groups.published = chance.randrange(2)
        run.groups.dropped_by_reason[chance.choice("xy")] = 1
    for stage in ("rollout", "reward"):
        if chance.random() < 0.5:
            run.queues.add(stage=stage, waiting=chance.randrange(2))
    if chance.random() < 0.5:
        run.alarms.add(kind=pb.ALARM_KIND_LOGPROB_GAP, first_step=chance.randrange(2))
    if chance.random() < 0.5:
        run.wait.evidence.extend(chance.sample(["one", "two", "three"], 2))
    return run


@each("seed", range(20))
def test_merged_changes_give_the_run_as_it_is(seed: int) -> None:
    chance = random.Random(seed)
    before, known = pb.Run(), pb.Run()
    for _ in range(50):
        after = some_run(chance)
        message = pb.WatchRunResponse.FromString(changes(before, after).SerializeToString())
        known = merge(known, message)
        assert known == after, message
        before = after


def test_only_what_has_changed_is_sent() -> None:
    before = pb.Run(run_id="r", config_json="{}" * 1000, step=3, reason="waiting", metrics={"loss": 1.0, "gone": 2.0})
    before.health.extend(
        Health(role="rollout", instance=f"rollout-{number:03}", state=HEALTH_STATE_HEALTHY) for number in range(512)
    )
    assert changes(before, before) == pb.WatchRunResponse(partial=True)

    after = pb.Run()
    after.CopyFrom(before)
    after.step, after.metrics["loss"] = 4, 0.5
    after.ClearField("reason")
    after.metrics.pop("gone")
    after.health[7].state = HEALTH_STATE_RESTARTING
    del after.health[9]
    restarting = Health(role="rollout", instance="rollout-007", state=HEALTH_STATE_RESTARTING)
    expected = pb.WatchRunResponse(
        partial=True,
        run=pb.Run(step=4, metrics={"loss": 0.5}, health=[restarting]),
        cleared=["reason"],
        removed_metrics=["gone"],
        removed_health=[Health(role="rollout", instance="rollout-009")],
    )
    assert changes(before, after) == expected
    assert merge(before, expected) == after


def test_a_whole_run_replaces_what_was_known_but_for_what_it_leaves_out() -> None:
    known = pb.Run(run_id="r", config_json="{}", reason="waiting", health=[Health(role="rollout")])
    message = pb.WatchRunResponse(run=pb.Run(run_id="r", step=4), unchanged=["config_json", "health"])
    assert merge(known, message) == pb.Run(run_id="r", step=4, config_json="{}", health=[Health(role="rollout")])
