"""The admission gate: staleness, memory, and what it says."""

from dataclasses import replace

import pytest

from relaxd.board import BoardUnavailable, GateClosed, NewGroup
from tests.kit.boards import LARGE, advance, audit, group, kept_samples, make_board, output, take

WORST = 8 << 20
"""16 answers of 16,384 tokens, about."""


def large(group_id: str, worst_bytes: int = WORST) -> NewGroup:
    return NewGroup(group_id, group(group_id).columns, worst_bytes=worst_bytes)


def room(board, worst_bytes: int = 1000) -> int:
    return board.admission(worst_bytes).room


def test_the_gate_bounds_staleness(redis_url):
    board = make_board(redis_url, groups_per_step=2, steps=4, max_staleness=1, oversample=1.5)
    assert room(board) == 6  # ceil((0 + 1 + 1) x 2 x 1.5)
    board.publish(term=1, groups=[group(f"g{i}") for i in range(6)])
    with pytest.raises(GateClosed, match=r"all 6 groups .* weight version 0 may answer are published") as caught:
        board.publish(term=1, groups=[group("more")], cursor=99)
    assert caught.value.limit == "staleness"
    assert board.cursor() is None
    assert board.drop_groups(["g0"], term=1, reason="by_hand")
    assert room(board) == 1
    board.set_gate(term=1, oldest_version=3, open=True)
    assert room(board) == 3  # the run needs 8 in all
    board.publish(term=1, groups=[group(f"h{i}") for i in range(3)])
    with pytest.raises(GateClosed, match="all 8 groups that the run needs") as caught:
        board.publish(term=1, groups=[group("more")])
    assert caught.value.limit == "complete"
    for open, version, limit in ((False, 3, "closed"), (True, None, "weights")):
        board.set_gate(term=1, oldest_version=version, open=open)
        assert (room(board), board.admission(1000).limit) == (0, limit)
        with pytest.raises(GateClosed):
            board.publish(term=1, groups=[group("more")])
    audit(board)


def test_a_step_of_long_answers_is_published_whatever_it_might_take(redis_url):
    """128 groups of 16 answers of up to 16,384 tokens would reserve 1.1 GB; the mark is 64 MB."""
    board = make_board(redis_url, groups_per_step=128, max_staleness=1, high_water_bytes=64 << 20)
    assert room(board, WORST) == 128  # what the open step lacks
    for start in range(0, 128, 16):
        board.publish(term=1, groups=[large(f"g{i}") for i in range(start, start + 16)])
    with pytest.raises(GateClosed, match=r"may need 1\.07 GB more; another group of up to 8\.39 MB") as caught:
        board.publish(term=1, groups=[large("surplus")])
    assert caught.value.limit == "memory"
    audit(board)

    # The answers turn out short: what is stored counts from then on, and what is expected of the next.
    for stage in ("rollout", "reward", "critic", "advantage"):
        advance(board, [stage, stage])  # a hundred at a time
    assert room(board, WORST) == 7  # 64 MB / 8 MB, less what is stored: still the worst case
    term = board.new_trainer_term()
    taken = [delivery.group_id for delivery in take(board, "train", "trainer", count=128)]
    board.commit_step(term=term, step=1, plan={"groups": taken}, metrics={})
    board.set_gate(term=1, oldest_version=1, open=True)
    assert (room(board, WORST), board.admission(WORST).limit) == (256, "staleness")
    audit(board)


def test_what_is_expected_is_learned_from_a_quarter_of_a_step(redis_url):
    board = make_board(redis_url, groups_per_step=8, max_staleness=9, high_water_bytes=64 << 20)
    board.publish(term=1, groups=[large(f"g{i}") for i in range(8)])
    advance(board, ["rollout"])
    assert room(board, WORST) == 7
    board.drop_groups(["g0"], term=1, reason="by_hand")
    assert room(board, WORST) == 7  # of which one for the step
    board.drop_groups(["g1"], term=1, reason="by_hand")
    assert room(board, WORST) == 74  # all that staleness allows
    (sizes,) = {int(size) for size in board._connection.client.lrange(f"{board.prefix}sizes", 0, -1)}
    board.publish(term=1, groups=[large("next")])
    stored, reserved = map(int, board._connection.client.hmget(f"{board.prefix}group:next", "stored", "room"))
    assert stored > 0
    assert stored + reserved == sizes
    audit(board)


def test_what_others_keep_in_redis_does_not_shut_the_gate(redis_url):
    board = make_board(redis_url, high_water_bytes=64 << 20)
    board._connection.client.set("something else", b"x" * (65 << 20))
    assert room(board) == 8
    board._connection.client.delete("something else")


def test_the_high_water_mark_follows_maxmemory(redis_server):
    board = make_board(redis_server(append_only=False).url, high_water_bytes=0)
    client = board._connection.client
    system = client.info("memory")["total_system_memory"]
    assert board.memory().max_bytes == system // 4
    client.config_set("maxmemory", 100 << 20)
    memory = board.memory()
    assert (memory.max_bytes, memory.high_water, memory.policy) == (100 << 20, 80 << 20, "noeviction")
    assert 0 < memory.used < memory.max_bytes


def test_a_full_redis_takes_no_more_but_lets_go(redis_server):
    server = redis_server(append_only=False)
    board = make_board(server.url, retry_seconds=0.2)
    board.publish(term=1, groups=[group("a"), group("b")])
    a, b = take(board, "rollout")
    term = board.new_trainer_term()
    board._connection.client.config_set("maxmemory", 1)
    assert board.admission(1000).limit == "full"
    for write in (
        lambda: board.publish(term=1, groups=[group("c")]),
        lambda: board.commit([(a, output("rollout", tokens=LARGE))]),
    ):
        with pytest.raises(BoardUnavailable, match=r"full .*maxmemory"):
            write()
    assert board.commit([(b, output("rollout"))]) == [True]
    board.commit_step(term=term, step=1, plan={"groups": ["a"]}, metrics={})
    assert board.drop_groups(["b"], term=1, reason="by_hand")
    audit(board)


def test_a_redis_that_stays_full_is_relieved_of_the_newest_surplus_groups(redis_server):
    board = make_board(redis_server(append_only=False).url, groups_per_step=2, max_staleness=9, max_retries=0)
    names = [f"g{i}" for i in range(6)]
    for name in names:
        board.publish(term=1, groups=[group(name)])
    advance(board, ["rollout", "reward", "critic", "advantage"], tokens=LARGE)
    board.new_trainer_term()
    held = take(board, "train", "trainer", count=1)[0].group_id
    client = board._connection.client
    assert board.relieve(term=1) == 0  # it is not full
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 1)
    dropped = 0
    for _ in range(10):  # each time as much as a twentieth of maxmemory
        dropped += board.relieve(term=1)
        client.config_set("maxmemory", 1)
    assert dropped == 4
    left = board.open_groups()
    assert len(left) == 2
    assert {held, "g0"} <= set(left) | {"g0"}
    assert held in left
    assert left == sorted(left)[:2]
    assert sorted(retry.group_id for retry in board.retries()) == sorted(set(names) - set(left))
    assert board.counts().consecutive_drops == 0
    audit(board)


def test_a_run_that_ended_leaves_no_prompts_behind(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    before = board.measure()
    board.drop_groups(["a"], term=1, reason="stale", retry=True)
    assert board.retries()
    board.purge(term=1)
    assert board.retries() == []
    assert not board._connection.client.keys(f"{board.prefix}columns:*")
    board.forget_fates(board.fates()[-1].entry_id, term=1)
    assert 0 < board.measure() < before + 1000
    audit(board)


def test_the_fate_of_a_traced_group_has_its_trace(redis_url):
    board, trace = make_board(redis_url), "0af7651916cd43dd8448eb211c80319c"
    traced = replace(group("a"), trace={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    board.publish(term=1, groups=[traced, replace(group("b"), trace={}), group("c")])  # c's is none that there can be
    board.drop_groups(["a", "b", "c"], term=1, reason="stale")
    assert {fate.line["group"]: fate.line.get("trace_id") for fate in board.fates()} == {
        "a": trace,
        "b": None,
        "c": None,
    }


def test_consumers_that_are_gone_are_forgotten(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    take(board, "rollout", "gone")
    take(board, "train", "old trainer")
    client = board._connection.client

    def consumers(stage: str) -> list[bytes]:
        return [one["name"] for one in client.xinfo_consumers(f"{board.prefix}stage:{stage}", "workers")]

    assert (consumers("rollout"), consumers("train")) == ([b"gone"], [b"old trainer"])
    board.reclaim(term=1, consumer="gone")
    board.new_trainer_term()
    assert (consumers("rollout"), consumers("train")) == ([], [])
    assert len(take(board, "rollout", "next")) == 1
    audit(board)


def test_long_samples_are_kept_in_smaller_numbers(redis_url):
    board = make_board(redis_url, groups_per_step=1, max_staleness=9)
    term = board.new_trainer_term()
    text = "x" * (1 << 20)
    for step in range(1, 5):
        board.publish(term=1, groups=[group(f"g{step}")])
        samples = [{"text": text, "number": n} for n in range(8)]
        board.commit_step(term=term, step=step, plan={"groups": [f"g{step}"]}, metrics={}, samples=samples)
    kept = kept_samples(board, limit=1000)
    assert len(kept) == 8
    assert (kept[-1]["step"], kept[-1]["number"]) == (4, 7)
    audit(board)
    assert board.sweep(term=1) > 4  # three steps' samples, and the columns of groups
    stored = [board._connection.client.strlen(key) for key in board._connection.client.keys(f"{board.prefix}columns:*")]
    assert sum(stored) <= 16 << 20
    assert kept_samples(board, limit=1000) == kept
