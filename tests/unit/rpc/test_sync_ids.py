"""Which calls of weight synchronisations trainer and engines accept, whatever clocks say."""

import time

import pytest

from relaxd.replica.replica_service import MAX_SYNC_ID, SyncIds
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from relaxd.rpc.leader_term import NewestTerm

DAY = 86400.0


def test_calls_of_earlier_synchronisations_are_refused() -> None:
    ids = SyncIds()
    ids.take(7)
    ids.take(7)
    ids.take(9)
    with pytest.raises(FailedPrecondition, match="sync_id is 8, but 9 was seen: it is over"):
        ids.take(8)


def test_an_id_that_would_block_every_later_one_is_refused() -> None:
    ids = SyncIds()
    with pytest.raises(InvalidArgument, match=f"must be at most {MAX_SYNC_ID}"):
        ids.take(2**63 - 1)
    ids.take(1)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_was_days_ahead_and_is_set_right_stops_no_synchronisation(
    monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    right, ids = time.time, SyncIds()
    monkeypatch.setattr(time, "time", lambda: right() + 40 * DAY)
    last = int(time.time() * 1000)
    ids.take(last)
    monkeypatch.setattr(time, "time", right)
    ids = SyncIds() if restarted else ids
    ids.take(last + 1)  # the coordinator's goes on from the last one


def test_a_later_coordinator_may_begin_with_smaller_ids() -> None:
    """Its Redis has lost the last ids, and its clock was set back."""
    coordinator = NewestTerm()
    ids = SyncIds(coordinator)
    for term in (3, 4, 1):  # the last one has a new Redis
        coordinator.newest = term
        ids.take(100 + term)
        ids.take(200 + term)
        with pytest.raises(FailedPrecondition):
            ids.take(100 + term)
