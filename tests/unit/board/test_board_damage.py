"""What is damaged in Redis ends as a clear error or a dropped group, never as readers that die of it one by one."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relaxd.board import BoardError, ColumnError, StageWorker
from tests.kit.boards import audit, end_leases, group, make_board, output, take

DAMAGED = (
    {},
    {"group": "g1"},
    {"group": b"\xff\xfe", "trace": "{}"},
    {"group": "g1", "trace": "not JSON"},
    {"group": "g1", "trace": "[1, 2]"},
    {"group": "g1", "trace": "{}", "attempts": "many"},
    {"group": "g1", "trace": "{}", "@publish": b"\xff"},
    {"trace": "{}", "@publish": "x"},
)


def damage(board, stage, group_id, fields):
    """Put another entry in the place of the group's."""
    client, key = board._connection.client, f"{board.prefix}group:{group_id}"
    stream = f"{board.prefix}stage:{stage}"
    client.xdel(stream, client.hget(key, f"entry:{stage}"))
    client.hset(key, f"entry:{stage}", client.xadd(stream, fields or {"": ""}))


@pytest.mark.parametrize("fields", DAMAGED)
def test_a_damaged_entry_is_dropped_and_counted(redis_url, fields):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("g1"), group("g2")])
    damage(board, "rollout", "g1", fields)
    assert [delivery.group_id for delivery in take(board, "rollout")] == ["g2"]
    assert board.counts().dropped_by_reason == {"damaged": 1}
    assert board.open_groups() == ["g2"]
    audit(board)


@pytest.mark.parametrize("fields", DAMAGED)
def test_a_damaged_entry_is_dropped_where_its_reader_died_of_it(redis_url, fields):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("g1"), group("g2")])
    damage(board, "rollout", "g1", fields)
    client = board._connection.client
    client.xreadgroup("workers", "dead", {f"{board.prefix}stage:rollout": ">"})
    end_leases(board, "rollout")
    assert [delivery.group_id for delivery in take(board, "rollout")] == ["g2"]
    assert board.counts().dropped_by_reason == {"damaged": 1}
    audit(board)


def test_an_entry_of_no_group_goes_away(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("g1")])
    client, stream = board._connection.client, f"{board.prefix}stage:rollout"
    client.xadd(stream, {"group": "nobody", "trace": "{}", "@publish": "nothing"})
    client.xadd(stream, {"nothing": "at all"})
    client.xreadgroup("workers", "dead", {stream: ">"})
    end_leases(board, "rollout")
    assert [delivery.group_id for delivery in take(board, "rollout")] == ["g1"]
    assert board.counts().dropped == 0
    audit(board)


def test_a_new_trainer_drops_what_the_last_one_could_not_have_read(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("g1")])
    for stage in ("rollout", "reward", "critic", "advantage"):
        assert all(board.commit([(delivery, output(stage)) for delivery in take(board, stage)]))
    damage(board, "train", "g1", {"group": "other", "trace": "{}"})
    board._connection.client.xreadgroup("workers", "dead", {f"{board.prefix}stage:train": ">"})
    assert board.new_trainer_term() == 1
    assert board.counts().dropped_by_reason == {"damaged": 1}
    audit(board)


FIELDS = st.dictionaries(
    st.sampled_from([b"group", b"trace", b"attempts", b"@publish", b"@rollout", b"\xff"]),
    st.binary(max_size=12) | st.sampled_from([b"g1", b"{}", b"null", b"-1", b"9" * 30]),
    max_size=5,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FIELDS)
def test_no_entry_kills_its_reader(redis_url, monkeypatch, fields):
    monkeypatch.setattr("relaxd.board.worker.TAKE_SECONDS", 0.01)  # else each example waits for the end of a read
    board = make_board(redis_url, max_deliveries=2)
    board.delete()
    board.create(term=1, groups_per_step=4, steps=100)
    board.set_gate(term=1, oldest_version=0, open=True)
    board.publish(term=1, groups=[group("g1"), group("g2")])
    damage(board, "rollout", "g1", fields)
    failures = []
    worker = StageWorker(
        board, "rollout", "worker", lambda d, c: output("rollout"), concurrency=2, on_failure=failures.append
    )
    for _ in range(4):
        for delivery in take(board, "rollout"):
            worker._admit([delivery])
        end_leases(board, "rollout")
    worker.start()
    worker.drain(5.0)
    assert not failures
    board.counts().check()
    board.close()


def test_a_damaged_ledger_is_named(redis_url):
    board = make_board(redis_url)
    board._connection.client.xadd(f"{board.prefix}ledger", {"time": "1", "term": "1", "plan": "{"}, id="1-0")
    with pytest.raises(BoardError, match="the ledger of run run after step 0 is damaged"):
        board.ledger()
    board._connection.client.xadd(f"{board.prefix}samples", {"count": 1, "pointer": "broken"}, id="1-0")
    with pytest.raises(BoardError, match="the samples of run run is damaged"):
        board.sample_page()


def test_what_is_too_large_is_refused_by_name(redis_url):
    board = make_board(redis_url, max_group_bytes=4096)
    board.publish(term=1, groups=[group("g1")])
    (delivery,) = take(board, "rollout")
    large = {"tokens": np.zeros(2000, np.int32), "versions": np.zeros(3, np.int64)}
    with pytest.raises(ColumnError, match=r"g1: the output of stage 'rollout' takes 8\d+ bytes; board.max_group_bytes"):
        board.commit([(delivery, large)])
    columns = {"prompt_tokens": np.zeros(3, np.int32), "prompt": "x" * 5000}
    with pytest.raises(ColumnError, match="g2: its prompt takes"):
        board.publish(term=1, groups=[type(group("g2"))("g2", columns)])
    assert board.commit([(delivery, output("rollout"))]) == [True]
    audit(board)
