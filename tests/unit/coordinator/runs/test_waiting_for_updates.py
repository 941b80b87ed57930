"""Engines that can't get weights because the trainer is changing them are named, and not bothered."""

import pytest

from relaxd.v1 import replica_pb2
from relaxd.v1.coordinator_pb2 import Registration
from services.coordinator.fleet.registry import Replica
from services.coordinator.state.records import Announcement
from services.coordinator.weights.weight_sync import waits_for_updates

ANNOUNCED = Announcement(run_id="r", replica_id="trainer-1", term=2, version=7)


def replica(name: str, version: tuple[int, int], *, changing: bool = False) -> Replica:
    weights = replica_pb2.WeightVersion(term=version[0], version=version[1])
    status = replica_pb2.ReplicaStatus(
        state=replica_pb2.REPLICA_STATE_READY,
        weights=weights,
        detail="step 8: update 3 of 4",
        gauges={"changing_weights": float(changing)},
    )
    return Replica(Registration(replica_id=name), 1.0, seen=1.0, status=status)


@pytest.mark.parametrize(
    ("trainer", "engines", "expected"),
    [
        (replica("t", (2, 7), changing=True), {"a": 7, "b": 6}, "b waits for weights, which t is changing"),
        (replica("t", (2, 7), changing=True), {"a": 5, "b": 6}, "a, b wait for weights, which t is changing"),
        (replica("t", (2, 7), changing=True), {"a": 7}, ""),
        (replica("t", (2, 7)), {"a": 6}, ""),
        # Its last heartbeat was before the version that it has announced since then.
        (replica("t", (2, 6), changing=True), {"a": 6}, ""),
    ],
)
def test_who_waits_for_the_updates(trainer: Replica, engines: dict[str, int], expected: str) -> None:
    found = waits_for_updates(trainer, ANNOUNCED, [replica(name, (2, at)) for name, at in engines.items()])
    assert found == (f"{expected} (step 8: update 3 of 4)" if expected else "")
