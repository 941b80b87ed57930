"""When engines get weights, and which wait because the trainer changes them."""

import pytest

from relaxd.v1 import replica_pb2
from relaxd.v1.coordinator_pb2 import Registration
from services.coordinator.fleet.registry import Replica, Version
from services.coordinator.state.records import Announcement
from services.coordinator.weights.weight_sync import is_due, waits_for_updates
from tests.kit.cases import each


@each(
    ("announced", "served", "interval", "due"),
    [
        ((1, 4), [(1, 3)], 1, True),
        ((1, 4), [(1, 4)], 1, False),
        ((1, 4), [(1, 3), (1, 4)], 1, True),
        ((1, 4), [(1, 2)], 3, False),
        ((1, 5), [(1, 2)], 3, True),
        ((1, 7), [(1, 2)], 3, True),  # late, after a failure
        ((1, 5), [(1, 2), (1, 4)], 3, True),  # counted from the oldest, as by the gate
        ((1, 4), [(1, 3), None], 3, True),  # one has joined, or was quarantined
        ((2, 4), [(1, 4)], 3, True),  # another trainer
        ((1, 10), [(1, 9)], 3, True),  # the last version
        ((1, 10), [(1, 10)], 3, False),
        ((1, 4), [], 3, False),
    ],
)
def test_when_a_synchronisation_is_due(
    announced: Version, served: list[Version | None], interval: int, due: bool
) -> None:
    assert is_due(announced, served, interval=interval, last=10) is due


@pytest.mark.parametrize("staleness", range(5))
def test_every_allowed_interval_lets_a_run_end(staleness: int) -> None:
    """The gate lets groups in for the steps up to oldest version + 1 + max_staleness. Longer intervals stop a run."""
    steps = 20
    for interval in range(1, staleness + 3):
        served, reached = 0, 0
        for step in range(1, steps + 1):
            if step > served + 1 + staleness:  # no group of this step can be published
                break
            reached = step
            if is_due((1, step), [(1, served)], interval=interval, last=steps):
                served = step
        assert (reached == steps) == (interval <= staleness + 1)
        assert interval > staleness + 1 or served == steps


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
