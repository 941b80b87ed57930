"""What a replica that is gone holds is freed by the coordinator, without waiting for any lease."""

import pytest

from relaxd.board import Fenced
from tests.kit.boards import audit, end_leases, group, make_board, output, take


def test_what_is_freed_goes_to_others_and_late_commits_change_nothing(redis_url):
    board = make_board(redis_url, lease_seconds=3600)
    board.publish(term=1, groups=[group("a"), group("b"), group("c")])
    first = take(board, "rollout", "gone", count=2)
    (other,) = take(board, "rollout", "there")
    assert board.reclaim(term=1, consumer="nobody") == 0
    assert board.reclaim(term=1, consumer="gone") == 2
    assert board.reclaim(term=1, consumer="gone") == 0
    assert board.renew("rollout", "gone", first) == set()
    assert board.renew("rollout", "there", [other]) == {other.group_id}
    again = take(board, "rollout", "there")
    assert {(d.group_id, d.attempt) for d in again} == {(d.group_id, 2) for d in first}
    # It was not gone after all: whoever commits first wins, the other changes nothing.
    assert board.commit([(first[0], output("rollout"))]) == [True]
    assert board.commit([(delivery, output("rollout")) for delivery in again]).count(False) == 1
    assert len(take(board, "reward")) == 2
    audit(board)


def test_a_group_that_kills_its_replicas_is_poison(redis_url):
    board = make_board(redis_url, lease_seconds=3600, max_deliveries=2)
    board.publish(term=1, groups=[group("a")])
    for number in range(2):
        assert len(take(board, "rollout", f"worker-{number}")) == 1
        assert board.reclaim(term=1, consumer=f"worker-{number}") == 1
    assert board.counts().dropped_by_reason == {"poison": 1}
    audit(board)


def test_the_trainers_holds_and_an_old_coordinator(redis_url):
    board = make_board(redis_url, lease_seconds=3600)
    board.publish(term=1, groups=[group("a")])
    for stage in ("rollout", "reward", "critic", "advantage"):
        board.commit([(delivery, output(stage)) for delivery in take(board, stage)])
    (held,) = take(board, "train", "trainer")
    assert board.reclaim(term=1, consumer="trainer") == 0
    assert board.renew("train", "trainer", [held]) == {"a"}
    board.set_gate(term=2, oldest_version=0, open=True)
    with pytest.raises(Fenced):
        board.reclaim(term=1, consumer="trainer")


def test_holds_are_looked_through_once_in_an_interval_however_many_consumers_ask(redis_url):
    board = make_board(redis_url, lease_seconds=3600, groups_per_step=64)
    board.publish(term=1, groups=[group(f"g{number}") for number in range(20)])
    take(board, "rollout", "dies", count=20)
    fleet = [make_board(redis_url, lease_seconds=3600, groups_per_step=64) for _ in range(16)]
    client = board._connection.client
    client.config_resetstat()
    for number, one in enumerate(fleet):
        assert one.take("rollout", f"replica-{number}", count=4, block_seconds=0) == []
    assert client.info("commandstats").get("cmdstat_xpending", {"calls": 0})["calls"] <= 1
    # Once it is time, whoever comes takes over as many groups as it wants, and leaves others to the next ones at once.
    end_leases(board, "rollout", "dies")
    client.delete(f"{board.prefix}claims")
    for one in fleet:
        one._next_claim.clear()
    found = [one.take("rollout", f"replica-{number}", count=4, block_seconds=0) for number, one in enumerate(fleet)]
    assert [len(taken) for taken in found] == [4] * 5 + [0] * 11
    audit(board)


def test_only_the_current_coordinator_drops_groups_that_it_does_not_hold(redis_url):
    board = make_board(redis_url, lease_seconds=3600, groups_per_step=200)
    names = [f"g{number}" for number in range(150)]
    board.publish(term=1, groups=[group(name) for name in names])
    (held,) = take(board, "rollout", "replica", count=1)
    board.set_gate(term=2, oldest_version=0, open=True)
    with pytest.raises(Fenced):
        board.drop_groups(names, term=1, reason="run_ended", counts="")
    assert len(board.open_groups()) == 150
    assert board.drop_groups([*names, "unknown"], term=2, reason="run_ended", counts="") == 150
    assert board.commit([(held, output("rollout"))]) == [False]
    counts = board.counts()
    assert (counts.dropped_by_reason, counts.consecutive_drops) == ({"run_ended": 150}, 0)
    audit(board)
