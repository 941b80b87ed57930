import threading
import time

import numpy as np
import pytest
import redis

from relaxd.board import (
    STAGES,
    Board,
    BoardError,
    BoardUnavailable,
    CriticOrders,
    DropReason,
    Fenced,
    NewGroup,
    PromptRetry,
    RunExists,
    RunMissing,
    StepConflict,
    microseconds,
    stages_for,
)
from relaxd.config import BoardConfig, DataConfig, ModelConfig, RewardConfig, RunConfig, RunSection
from relaxd.redis_client import key_prefix
from tests.kit.boards import LARGE, advance, audit, end_leases, group, kept_samples, make_board, output, take


def held_by_stage(board):
    return {depth.stage: (depth.waiting, depth.held) for depth in board.queues()}


# --- the way of a group ---------------------------------------------------------------------------------------------


def test_what_each_stage_took_travels_with_the_group(redis_url):
    board = make_board(redis_url)
    before = microseconds()
    board.publish(term=1, groups=[group("a"), group("b")])
    worked = {}
    for number, stage in enumerate(("rollout", "critic", "reward", "advantage")):
        deliveries = take(board, stage)
        if stage == "reward":  # another attempt: what counts is when it was offered again
            board.nack(stage, "worker", deliveries)
            deliveries = take(board, stage)
        for delivery in deliveries:
            worked[stage] = delivery.worked = (before + number, before + 100 + number)
        if stage == "critic":
            deliveries[1].worked = None  # whoever commits need not say
        assert all(board.commit([(delivery, output(stage)) for delivery in deliveries]))
    first, _ = take(board, "train")
    board.nack("train", "worker", [first])  # as a trainer that ends does
    (first,) = take(board, "train")
    both = board.times(["a", "b", "gone"])
    assert both.keys() == {"a", "b"}
    times = both["a"]
    assert {stage: (time.started_at, time.ended) for stage, time in times.stages.items()} == worked
    assert both["b"].stages.keys() == worked.keys() - {"critic"}
    assert before - 1000 <= times.published <= microseconds() + 1000
    offered = [times.stages[stage].enqueued_at for stage in ("rollout", "reward", "advantage")] + [first.enqueued_at]
    assert offered == sorted(offered)
    assert offered[0] == times.published // 1000 * 1000
    assert board._connection.client.object("encoding", f"{board.prefix}group:a") == b"listpack"  # no value is long
    time = times.stages["advantage"]
    assert time.work_seconds == 0.0001
    assert time.queue_seconds == 0  # it says that it began before it was offered: clocks differ


@pytest.mark.parametrize("tokens", [3, LARGE])
def test_a_group_goes_from_publish_to_the_ledger(redis_url, tokens):
    board = make_board(redis_url)
    assert board.publish(term=1, groups=[group("a"), group("b")], cursor={"index": 2}) == ["a", "b"]
    assert board.cursor() == {"index": 2}
    (first, second) = take(board, "rollout")
    assert (first.group_id, first.attempt, first.trace) == ("a", 1, {"traceparent": "trace-of-a"})
    assert 0 <= microseconds() - first.enqueued_at + 1000 < 10_000_000
    loaded = board.load([first, second], ["prompt_tokens", "prompt"])
    np.testing.assert_array_equal(loaded[1]["prompt_tokens"], np.arange(4))
    assert loaded[1]["prompt"] == {"text": "prompt of b"}

    assert board.commit([(d, output("rollout", tokens=tokens)) for d in (first, second)]) == [True, True]
    assert held_by_stage(board) == {
        "rollout": (0, 0),
        "reward": (2, 0),
        "critic": (2, 0),
        "advantage": (0, 0),
        "train": (0, 0),
    }
    advance(board, ["reward"])
    assert held_by_stage(board)["advantage"] == (0, 0)  # it also needs values
    audit(board)
    advance(board, ["critic", "advantage"], tokens=tokens)
    term = board.new_trainer_term()
    (delivery, _) = deliveries = take(board, "train", "trainer")
    assert delivery.trace == {"traceparent": "trace-of-a"}
    columns = board.load(deliveries, ["prompt", "tokens", "advantages", "reward"])[0]
    assert columns["tokens"].shape == columns["advantages"].shape == (tokens,)
    plan = {"groups": ["b", "a"], "micro_batches": [[0], [1]]}
    board.commit_step(term=term, step=1, plan=plan, metrics={"loss": 0.5}, samples=[{"text": "x"}, {"text": "y"}])

    (entry,) = board.ledger()
    assert (entry.step, entry.term, entry.plan, entry.metrics) == (1, term, plan, {"loss": 0.5})
    assert abs(entry.time - time.time()) < 60
    assert kept_samples(board) == kept_samples(board, 1) == [{"text": "x", "step": 1}, {"text": "y", "step": 1}]
    assert (kept_samples(board, 2), kept_samples(board, limit=1)) == ([], [{"text": "y", "step": 1}])
    (newest,) = board.sample_page(1, limit=1)
    assert newest == ("1-1", {"text": "y", "step": 1})
    for step in (None, 1):
        assert board.sample_page(step, "1-1") == [("1-0", {"text": "x", "step": 1})]
        assert board.sample_page(step, "1-0") == []
    assert (board.counts().trained, board.counts().open, board.last_step()) == (2, 0, 1)
    audit(board)
    assert board.sweep(term=1) == 2 * 5  # each group has the columns of five writers
    assert board.sweep(term=1) == 0
    left = board._connection.client.keys(f"{board.prefix}columns:*")
    assert all(key.startswith(f"{board.prefix}columns:step-1.".encode()) for key in left)
    assert len(left) == 3  # two samples, and what says that they were accepted
    audit(board)


def test_small_columns_share_a_payload_and_large_ones_do_not(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    advance(board, ["rollout"], tokens=LARGE)
    sizes = sorted(board._connection.client.strlen(key) for key in board._connection.client.keys("*columns:*"))
    assert len(sizes) == 4  # the prompt, an empty share, tokens (80 kB), versions (160 kB)
    assert sizes[0] < 1000 < 4 * LARGE < sizes[2]


def test_the_projects_own_stages_lead_to_the_trainer():
    config = RunConfig(
        run=RunSection(steps=1),
        model=ModelConfig(path="m"),
        data=DataConfig(source="addition"),
        reward=RewardConfig(name="addition"),
    )
    stages = stages_for(config)
    written = {"prompt", "prompt_tokens"}
    for stage in stages:
        assert set(stage.needs) <= written, f"{stage.name} needs what nobody before it writes"
        written |= set(stage.writes)
    assert stages[-1] == STAGES["train"]


def test_the_trainer_takes_in_routed_experts_only_to_replay_them():
    sections = {"run": {"steps": 1}, "model": {"path": "m"}, "data": {"source": "addition"}, "reward": {"name": "math"}}
    for replay in ("none", "rollout", "trainer"):
        config = RunConfig.model_validate(
            {
                **sections,
                "rollout": {"engine": "sglang", "return_routed_experts": True},
                "trainer": {"routing_replay": replay, "epochs": 2},
            }
        )
        first, *_, last = stages_for(config)
        assert "routed_experts" in first.writes
        assert ("routed_experts" in last.needs) == (replay == "rollout")


def test_columns_that_a_stage_does_not_write_are_refused(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")
    with pytest.raises(ValueError, match="stage 'rollout' writes columns tokens, versions; got tokens"):
        board.commit([(delivery, {"tokens": np.zeros(1)})])
    with pytest.raises(BoardError, match="group a has no columns of 'reward' yet"):
        board.load([delivery], ["reward"])
    with pytest.raises(ValueError, match="stage 'nosuch' is not in run run"):
        board.take("nosuch", "w", count=1, block_seconds=0)


def test_a_blocked_take_wakes_up_when_a_group_comes(redis_url):
    board = make_board(redis_url)
    result = []
    thread = threading.Thread(target=lambda: result.extend(board.take("rollout", "w", count=5, block_seconds=20)))
    thread.start()
    board.publish(term=1, groups=[group("a")])
    thread.join(timeout=15)  # less than it would block
    assert [delivery.group_id for delivery in result] == ["a"]
    begun = time.monotonic()
    assert board.take("rollout", "w", count=5, block_seconds=0.1) == []
    assert 0.05 < time.monotonic() - begun < 10


# --- holds -----------------------------------------------------------------------------------------------------------


def test_what_a_dead_worker_held_goes_to_another(redis_url):
    board = make_board(redis_url, lease_seconds=0.1)
    board.publish(term=1, groups=[group("a")])
    (dead,) = board.take("rollout", "dead", count=1, block_seconds=1)
    (claimed,) = board.take("rollout", "living", count=1, block_seconds=5)  # no help: the real lease runs out
    assert (claimed.group_id, claimed.attempt, claimed.consumer) == ("a", 2, "living")
    assert board.renew("rollout", "dead", [dead]) == set()
    assert board.renew("rollout", "living", [claimed]) == {"a"}
    assert not board.begin(dead, 0)
    assert not board.drop(dead, reason="late")
    assert board.nack("rollout", "dead", [dead]) == 0
    assert board.commit([(claimed, output("rollout"))]) == [True]
    assert board.commit([(dead, output("rollout"))]) == [False]
    audit(board)


def test_the_first_commit_wins_even_if_it_lost_its_hold(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    (stalled,) = take(board, "rollout", "stalled")
    end_leases(board, "rollout")
    (second,) = take(board, "rollout", "second")
    board.begin(second, 5)
    assert board.commit([(stalled, output("rollout", version=3))]) == [True]
    assert board.open_versions() == {"a": 3}  # what was committed counts, not what began last
    assert board.commit([(second, output("rollout", version=5))]) == [False]
    (delivery,) = take(board, "reward")
    assert board.load([delivery], ["versions"])[0]["versions"].tolist() == [3, 3, 3]
    audit(board)


def test_renewed_holds_are_not_claimed(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    kept, lost = take(board, "rollout", "one")
    end_leases(board, "rollout")
    board.renew("rollout", "one", [kept])
    assert [d.group_id for d in take(board, "rollout", "two")] == ["b"]
    assert board.renew("rollout", "one", [kept, lost]) == {"a"}


def test_an_earlier_hold_of_the_same_worker_is_over_too(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    (before,) = take(board, "rollout", "restarted")
    end_leases(board, "rollout")
    (after,) = take(board, "rollout", "restarted")
    assert (before.entry_id, before.attempt, after.attempt) == (after.entry_id, 1, 2)
    assert board.renew("rollout", "restarted", [before]) == set()
    assert not board.drop(before, reason="late")
    assert board.begin(after, 0)
    assert board.renew("rollout", "restarted", [after]) == {"a"}


def test_released_groups_are_taken_at_once_and_only_failures_count(redis_url):
    board = make_board(redis_url, max_deliveries=2)
    board.publish(term=1, groups=[group("a")])
    for _ in range(4):
        (delivery,) = take(board, "rollout", "one")
        assert delivery.attempt == 1
        assert board.nack("rollout", "one", [delivery]) == 1
    (delivery,) = take(board, "rollout", "one")
    assert board.nack("rollout", "one", [delivery], failed=True) == 1
    (delivery,) = take(board, "rollout", "two")
    assert delivery.attempt == 2
    audit(board)
    assert board.nack("rollout", "two", [delivery], failed=True) == 1
    assert board.counts().dropped_by_reason == {"poison": 1}
    audit(board)


def test_a_group_that_kills_its_workers_is_poison(redis_url):
    board = make_board(redis_url, max_deliveries=3)
    board.publish(term=1, groups=[group("a"), group("good")])
    good = take(board, "rollout", "first")[1]
    board.commit([(good, output("rollout"))])
    for attempt in (2, 3):
        end_leases(board, "rollout")
        assert [d.attempt for d in take(board, "rollout", f"worker{attempt}")] == [attempt]
    end_leases(board, "rollout")
    assert take(board, "rollout", "last") == []
    (dropped,) = board.dropped()
    assert (dropped.group_id, dropped.reason, dropped.stage, dropped.attempt) == ("a", "poison", "rollout", 3)
    assert dropped.columns["prompt"] == {"text": "prompt of a"}
    assert board.counts().consecutive_drops == 1
    audit(board)


def test_a_group_that_was_closed_meanwhile_loads_as_none(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    deliveries = take(board, "rollout")
    assert board.drop_groups(["a"], term=1, reason="by_hand")
    assert not board.drop_groups(["a"], term=1, reason="by_hand")
    a, b = board.load(deliveries, ["prompt"])
    assert a is None
    assert b is not None
    assert board.load(deliveries[:1], ["prompt", "reward"]) == [None]
    assert board.commit([(d, output("rollout")) for d in deliveries]) == [False, True]
    audit(board)


# --- publishing ----------------------------------------------------------------------------------------------------


def test_publishing_again_changes_nothing(redis_url):
    board = make_board(redis_url, groups_per_step=2)
    for _ in range(2):
        board.publish(term=1, groups=[group("a"), group("b")], cursor=2)
    assert board.counts().published == 2
    with pytest.raises(BoardError, match="group a is open already"):
        board.publish(term=1, groups=[group("a")])
    audit(board)


def test_a_dropped_prompt_is_tried_again_as_often_as_allowed(redis_url):
    board = make_board(redis_url, max_retries=2)
    board.publish(
        term=1,
        groups=[
            group(
                "a",
            )
        ],
    )
    for number in range(3):
        name = f"a~{number}" if number else "a"
        assert board.drop_groups([name], term=1, reason="stale", retry=True)
        assert not board.drop_groups([name], term=1, reason="stale", retry=True)
        if number < 2:
            assert board.retries() == [PromptRetry(name, number)]
            for _ in range(2):
                board.publish(term=1, groups=[group(f"a~{number + 1}", retry_of=name)])
            audit(board)
    assert board.retries() == []
    with pytest.raises(BoardError, match="no retry of group a is waiting"):
        board.publish(term=1, groups=[group("b", retry_of="a")])
    assert board.counts().dropped_by_reason == {"stale": 3}
    assert [d.retried for d in board.dropped()] == [False, True, True]
    audit(board)


def test_a_retried_prompt_keeps_its_columns(redis_url):
    board = make_board(redis_url)
    columns = {"prompt_tokens": np.arange(LARGE, dtype=np.int32), "prompt": "long"}
    board.publish(term=1, groups=[NewGroup("a", columns)])
    board.drop_groups(["a"], term=1, reason="stale", retry=True)
    board.publish(term=1, groups=[NewGroup("a~1", retry_of="a")])
    loaded = board.load(take(board, "rollout"), ["prompt_tokens", "prompt"])[0]
    np.testing.assert_array_equal(loaded["prompt_tokens"], columns["prompt_tokens"])
    assert loaded["prompt"] == "long"


def test_prompts_whose_reward_failed_wait_for_a_repaired_reward(redis_url):
    board = make_board(redis_url, max_retries=0)
    board.publish(term=1, groups=[group("a"), group("b"), group("c")])
    held = take(board, "rollout", count=2)
    assert board.drop(held[0], reason=DropReason.REWARD_FAILED)
    assert board.drop(held[1], reason=DropReason.REWARD_FAILED)
    assert board.drop_groups(["c"], term=1, reason=DropReason.BAD_PROMPT)
    assert board.retries() == []
    with pytest.raises(Fenced):
        board.retry_unscored(term=0)
    assert (board.retry_unscored(term=1), board.retry_unscored(term=1)) == (2, 0)
    assert board.retries() == [PromptRetry("a", 0), PromptRetry("b", 0)]
    board.publish(term=1, groups=[NewGroup("a~1", retry_of="a")])
    (again,) = take(board, "rollout")
    assert board.load([again], ["prompt"]) == [{"prompt": {"text": "prompt of a"}}]
    assert board.drop(again, reason=DropReason.REWARD_FAILED)
    assert board.retry_unscored(term=1) == 1
    assert board.retries() == [PromptRetry("a~1", 1), PromptRetry("b", 0)]
    audit(board)
    assert board.counts().dropped_by_reason == {"reward_failed": 3, "bad_prompt": 1}
    board.purge(term=1)
    assert board.retries() == []
    assert not board._connection.client.keys(f"{board.prefix}columns:*")


def test_the_group_that_has_been_at_a_stage_for_the_longest_is_known(redis_url):
    board = make_board(redis_url)
    assert board.oldest_held() == {}
    board.publish(term=1, groups=[group("a"), group("b")])
    board.publish(term=1, groups=[group("c")])
    (first, *_) = take(board, "rollout", count=2)
    held = board.oldest_held()
    assert list(held) == ["rollout"]
    assert (held["rollout"].group_id, held["rollout"].holder) == (first.group_id, first.consumer)
    assert held["rollout"].enqueued_at == pytest.approx(first.enqueued_at / 1e6, abs=0.01)
    board.nack("rollout", first.consumer, [first], failed=True)
    assert board.oldest_held()["rollout"].group_id == "b"
    for name in ("b", "c"):
        assert board.drop_groups([name], term=1, reason=DropReason.BAD_PROMPT)
    (again,) = take(board, "rollout", "another")
    oldest = board.oldest_held()["rollout"]
    assert (oldest.group_id, oldest.holder, oldest.deliveries) == ("a", "another", again.attempt) == ("a", "another", 2)
    assert board.drop_groups(["a"], term=1, reason=DropReason.BAD_PROMPT)
    assert board.oldest_held() == {}


# --- terms ----------------------------------------------------------------------------------------------------------


def test_a_coordinator_that_was_replaced_changes_nothing(redis_url):
    board = make_board(redis_url)
    board.create(term=2, groups_per_step=4, steps=100)
    for write in (
        lambda: board.create(term=1, groups_per_step=4, steps=100),
        lambda: board.set_gate(term=1, oldest_version=9, open=False),
        lambda: board.publish(term=1, groups=[group("a")], cursor=1),
    ):
        with pytest.raises(Fenced, match="term 1 is over"):
            write()
    assert board.publish(term=2, groups=[group("a")]) == ["a"]
    with pytest.raises(RunExists):
        board.create(term=2, groups_per_step=5, steps=100)
    audit(board)


def test_a_trainer_that_was_replaced_commits_nothing(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    advance(board, ["rollout", "reward", "critic", "advantage"])
    old = board.new_trainer_term()
    (a, _) = take(board, "train", "old")
    new = board.new_trainer_term()
    assert board.trainer_term() == new == old + 1
    with pytest.raises(Fenced, match="trainer term 1 is over"):
        board.commit_step(term=old, step=1, plan={"groups": ["a"]}, metrics={})
    assert not board.drop(a, reason="stale")
    assert [d.attempt for d in take(board, "train", "new")] == [2, 2]  # without waiting for the lease
    board.commit_step(term=new, step=1, plan={"groups": ["a", "b"]}, metrics={})
    audit(board)


def test_steps_follow_one_another_and_train_only_open_groups_once(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    term = board.new_trainer_term()

    def commit(step, *groups, metrics=None):
        board.commit_step(term=term, step=step, plan={"groups": list(groups)}, metrics=metrics or {})

    for step, groups, message in (
        (2, ["a"], "step 2 cannot follow step 0"),
        (0, [], "step 0 cannot follow step 0"),
        (1, ["a", "a"], "group a is twice"),
        (1, ["a", "nosuch"], "group nosuch of step 1 is not open"),
    ):
        with pytest.raises(StepConflict, match=message):
            commit(step, *groups)
    commit(1, "a", metrics={"loss": 1.0})
    commit(1, "a", metrics={"loss": 1.0})  # the reply was lost: said again
    with pytest.raises(StepConflict, match="step 1 cannot follow step 1"):
        commit(1, "b")
    with pytest.raises(StepConflict, match="group a of step 2 is not open"):
        commit(2, "a", "b")
    commit(2, "b")
    assert [entry.plan["groups"] for entry in board.ledger()] == [["a"], ["b"]]
    assert [entry.step for entry in board.ledger(after_step=1)] == [2]
    audit(board)


def test_a_step_ends_a_row_of_drops(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group(f"g{i}") for i in range(3)])
    board.drop_groups(["g0"], term=1, reason="x")
    board.drop_groups(["g1"], term=1, reason="y")
    assert board.counts().consecutive_drops == 2
    board.commit_step(term=board.new_trainer_term(), step=1, plan={"groups": ["g2"]}, metrics={})
    assert board.counts().consecutive_drops == 0


# --- Redis away, runs apart ------------------------------------------------------------------------------------------


def test_a_restart_of_redis_is_survived(redis_server):
    server = redis_server(append_only=True)
    board = make_board(server.url)
    board.publish(term=1, groups=[group("a"), group("b")], cursor=2)
    (a, _) = take(board, "rollout", "one")
    board.commit([(a, output("rollout"))])
    server.restart()
    assert board.renew("rollout", "one", [a]) == set()  # the scripts are loaded anew, the connections made anew
    assert board.counts().open == 2
    assert board.cursor() == 2
    assert held_by_stage(board)["rollout"] == (0, 1)
    end_leases(board, "rollout")
    assert [d.attempt for d in take(board, "rollout", "two")] == [2]
    audit(board)


def test_an_operation_waits_for_redis_and_gives_up_in_time(redis_server):
    server = redis_server(append_only=True)
    board = make_board(server.url, timeout_seconds=1.0, retry_seconds=5.0)
    server.kill()
    starter = threading.Timer(0.3, server.start)
    starter.start()
    assert board.publish(term=1, groups=[group("a")]) == ["a"]
    starter.join()
    server.kill()
    board._connection.retry_seconds = 0.2
    begun = time.monotonic()
    with pytest.raises(BoardUnavailable, match=f"127.0.0.1:{server.port}"):
        board.counts()
    assert time.monotonic() - begun < 4  # less than the 5 s before


def test_runs_do_not_mix_and_one_can_be_deleted(redis_url):
    boards = [make_board(redis_url, run_id=name) for name in ("one", "one.2")]
    for board in boards:
        board.publish(term=1, groups=[group("a")])
    (delivery,) = take(boards[0], "rollout")
    boards[0].delete()
    assert not redis.Redis.from_url(redis_url).keys(key_prefix("one") + "*")
    for read in (
        boards[0].counts,
        boards[0].queues,
        boards[0].last_step,
        boards[0].cursor,
        lambda: boards[0].admission(1),
    ):
        with pytest.raises(RunMissing):
            read()
    with pytest.raises(RunMissing):
        boards[0].take("rollout", "w", count=1, block_seconds=0)
    assert boards[0].commit([(delivery, output("rollout"))]) == [False]
    assert not redis.Redis.from_url(redis_url).keys(key_prefix("one") + "*")
    assert len(take(boards[1], "rollout")) == 1
    audit(boards[1])


@pytest.mark.parametrize("name", ["", "a b", "a:b", "coordinator", "a*"])
def test_a_run_id_that_could_clash_is_refused(name):
    with pytest.raises(ValueError, match="run id"):
        Board("redis://localhost", name, STAGES.values(), BoardConfig())


# --- done again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, LARGE])
def test_a_stage_does_its_work_again_and_the_next_gets_what_is_new(redis_url, tokens):
    board = make_board(redis_url, max_deliveries=2)
    board.publish(term=1, groups=[group("a"), group("b")])
    advance(board, ["rollout", "reward", "critic", "advantage"], tokens=tokens)
    (first, second) = take(board, "train", "trainer")
    for _ in range(3):  # more often than a group may fail
        assert board.redo("train", "trainer", [first], again="critic") == 1
        audit(board)
        assert board.redo("train", "trainer", [first], again="critic") == 0  # repeated: the reply was lost
        assert held_by_stage(board)["train"] == (0, 1)
        assert board.open_groups() == ["a", "b"]
        (again,) = take(board, "critic")
        assert (again.group_id, again.attempt) == ("a", 1)
        new = {"values": np.full(tokens, 7, np.float32)}
        assert board.commit([(again, new)]) == [True]
        audit(board)
        (first,) = take(board, "train", "trainer")
        assert (first.group_id, first.attempt) == ("a", 1)
        (columns,) = board.load([first], ["values", "advantages"])
        np.testing.assert_array_equal(columns["values"], new["values"])
    assert take(board, "advantage") == []  # what it wrote stays
    board.commit_step(term=board.new_trainer_term(), step=1, plan={"groups": ["a", "b"]}, metrics={})
    audit(board)
    board.sweep(term=1)
    assert not board._connection.client.keys(f"{board.prefix}columns:*")
    assert board.redo("train", "trainer", [first, second], again="critic") == 0  # both are closed


def test_the_attempts_of_one_trainer_end_those_of_another(redis_url):
    board = make_board(redis_url)
    assert [board.new_attempt("first", 0), board.new_attempt("first", 1), board.new_attempt("first", 1)] == [1, 2, 3]
    assert board.new_attempt("first", 10) == 11  # a host knew a newer one than Redis
    assert board.new_attempt("second", 0) == 12
    with pytest.raises(Fenced, match="trainer attempt 11 is over: another trainer has begun 12"):
        board.new_attempt("first", 11)
    assert board.new_attempt("second", 12) == 13


def test_a_new_critic_term_supersedes_the_last(redis_url):
    board = make_board(redis_url)
    assert (board.new_critic_term(), board.new_critic_term(), board.critic_orders().term) == (1, 2, 2)


def test_the_trainer_asks_the_critic_for_checkpoints(redis_url):
    board = make_board(redis_url)
    assert board.critic_orders() == CriticOrders(term=0, checkpoint=None, kept=None)
    term = board.new_trainer_term()
    board.ask_critic(term=term, step=0, keep=True)
    board.ask_critic(term=term, step=3, keep=False)
    assert board.critic_orders() == CriticOrders(term=0, checkpoint=3, kept=0)
    board.new_trainer_term()
    with pytest.raises(Fenced, match="trainer term 1 is over: 2 trains"):
        board.ask_critic(term=term, step=4, keep=True)
    assert board.critic_orders() == CriticOrders(term=0, checkpoint=3, kept=0)
