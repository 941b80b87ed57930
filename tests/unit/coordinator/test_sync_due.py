"""When engines get new weights, and that the gate never shuts before they do."""

import pytest

from services.coordinator.fleet.registry import Version
from services.coordinator.weights.sync_members import is_due
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
