"""What a replica that is gone holds is freed by the coordinator, without waiting for any lease."""

import pytest

from relaxd.board import Fenced
from tests.kit.boards import audit, group, make_board, output, take


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
