"""Messages as JSON for the page."""

import json
import math

from relaxd.rpc.message_parts import plain
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import replica_pb2, scaling_pb2
from services.console.live_changes import fleet_form, numbers


def test_a_message_becomes_plain_values() -> None:
    run = pb.Run(run_id="r", state=pb.RUN_STATE_PAUSED, step=2**40, metrics={"loss": math.nan, "lr": 0.5})
    run.create_time.FromNanoseconds(1_500_000_000)
    run.queues.add(stage="reward", waiting=3)
    run.wait.kind = pb.WAIT_KIND_HELD_GROUP
    form = plain(run, without=("config_json",))
    assert (form["run_id"], form["state"], form["step"], form["create_time"]) == ("r", "paused", 2**40, 1.5)
    assert form["metrics"] == {"loss": None, "lr": 0.5}
    assert form["queues"] == [{"stage": "reward", "waiting": 3, "held": 0}]
    assert (form["wait"]["kind"], form["outcome"]) == ("held_group", "")
    assert "config_json" not in form
    assert "end_time" not in form
    assert "oldest_engine_version" not in form
    json.dumps(form, allow_nan=False)


def test_numbers_are_finite() -> None:
    assert numbers({"a": 1.0, "b": math.inf, "c": math.nan}) == {"a": 1.0}


def test_enums_of_nested_messages_become_words() -> None:
    request = scaling_pb2.ScaleRequest(direction=scaling_pb2.SCALE_DIRECTION_OUT)
    request.scaled.add(state=scaling_pb2.SCALE_STATE_CREATING)
    form = plain(request)
    assert (form["direction"], form["scaled"][0]["state"]) == ("out", "creating")


def test_the_fleet_is_a_column_for_each_fact() -> None:
    engine = pb.RegisteredReplica(leased_gpu_uuids=["GPU-1", "GPU-2"], heartbeat_age_seconds=4.2)
    engine.registration.replica_id, engine.registration.role = "rollout-1", "rollout"
    engine.status.state, engine.status.held_groups = replica_pb2.REPLICA_STATE_READY, 3
    engine.status.weights.version = 7
    reward = pb.RegisteredReplica(heartbeat_age_seconds=0.9)
    reward.registration.replica_id, reward.registration.role = "reward-1", "reward"
    assert fleet_form([engine, reward]) == {
        "id": ["rollout-1", "reward-1"],
        "role": ["rollout", "reward"],
        "state": ["ready", ""],
        "version": [7, None],
        "held": [3, 0],
        "done": [0, 0],
        "gpus": [2, 0],
        "silent": [4, 0],
    }
