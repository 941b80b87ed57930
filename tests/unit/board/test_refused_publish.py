"""A publish that is refused, or comes again, leaves no payload: they are set in one transaction with its script."""

import numpy as np
import pytest
import redis

from relaxd.board import (
    Board,
    BoardError,
    Fenced,
    GateClosed,
    NewGroup,
    RunMissing,
    payload_transfer,
)
from relaxd.board.scripts import run_script
from relaxd.board.sides import side_base
from relaxd.redis_client import passing
from tests.kit.boards import LARGE, audit, commands_of, group, make_board, make_overdue, take


def keys_of(board: Board) -> list[str]:
    """All keys of a run."""
    return sorted(key.decode() for key in board._connection.client.keys(f"{board.prefix}*"))


def prompts(*names: str) -> list[NewGroup]:
    """Prompts of which every second has a large column."""
    large = {"prompt_tokens": np.arange(LARGE), "prompt": "?"}
    return [NewGroup(name, large) if index % 2 else group(name) for index, name in enumerate(names)]


def shut(board: Board) -> list[NewGroup]:
    board.set_gate(term=1, oldest_version=0, open=False)
    return prompts("b", "c")


def replaced(board: Board) -> list[NewGroup]:
    board.create(term=2, groups_per_step=4, steps=100)
    return prompts("b", "c")


def deleted(board: Board) -> list[NewGroup]:
    board.delete()
    return prompts("b")


REFUSALS = {
    "the gate is shut": (shut, GateClosed, "closed"),
    "there is no room": (lambda board: prompts(*(f"g{i}" for i in range(200))), GateClosed, "stale"),
    "one is open": (lambda board: prompts("b", "c", "a"), BoardError, "group a is open already"),
    "a retry isn't one": (
        lambda board: [*prompts("b", "c"), group("d", retry_of="x")],
        BoardError,
        "no retry of group x",
    ),
    "another coordinates": (replaced, Fenced, "2 coordinates"),
    "the run is gone": (deleted, RunMissing, "not on the board"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_refused_leaves_nothing(redis_url: str, why: str) -> None:
    prepare, error, message = REFUSALS[why]
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    groups = prepare(board)
    before = keys_of(board)
    with pytest.raises(error, match=message):
        board.publish(term=1, groups=groups)
    if before:
        make_overdue(board)
        board.sweep(term=2 if why == "another coordinates" else 1)
        audit(board)
    lasting = [key for key in keys_of(board) if board._connection.client.ttl(key) == -1]
    assert lasting == before


def test_a_group_that_is_there_twice_is_named(redis_url: str) -> None:
    board = make_board(redis_url)
    with pytest.raises(ValueError, match="group_id 'b' is twice"):
        board.publish(term=1, groups=prompts("a", "b", "c", "b"))
    with pytest.raises(ValueError, match="retry_of 'x' is twice"):
        board.publish(term=1, groups=[group("a", retry_of="x"), group("b", retry_of="x")])
    assert board.counts().published == 0


def test_what_comes_again_after_it_was_swept_leaves_nothing(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board = make_board(redis_url)
    sent = commands_of(board, monkeypatch)
    board.publish(term=1, groups=[group("a"), group("b")])
    first = sent.copy()
    board.drop_groups(["a"], term=1, reason="by_hand")
    board.sweep(term=1)
    before = keys_of(board)
    for _ in range(2):
        assert board._connection.write(first)[-1][0] == 0
        assert keys_of(board) == before
        audit(board)


def test_what_comes_again_when_nothing_of_it_is_left_does_nothing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = make_board(redis_url)
    sent = commands_of(board, monkeypatch)
    board.publish(term=1, groups=[group("a"), group("b")])
    first = sent.copy()
    board.drop_groups(["a", "b"], term=1, reason="by_hand")
    board.sweep(term=1)
    board.publish(term=1, groups=[group("c")])
    before = keys_of(board)
    assert board._connection.write(first)[-1][0] == 0
    assert keys_of(board) == before
    assert board.open_groups() == ["c"]
    audit(board)


def test_only_the_last_publishes_are_remembered(redis_url: str) -> None:
    board = make_board(redis_url)
    client: redis.Redis = board._connection.client
    remembered = f"{board.prefix}publishes"
    client.zadd(remembered, {f"old{i}": i - 2000 for i in range(2000)})
    board.publish(term=1, groups=[group("a")])
    assert client.zcard(remembered) == 1024
    newest = client.zrange(remembered, -2, -1)
    assert newest[0] == b"old1999"
    assert newest[1].startswith(b"a.")


@pytest.mark.parametrize("swept", [False, True])
def test_what_comes_again_after_another_publish_costs_no_retry_its_prompt(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    board = make_board(redis_url)
    sent = commands_of(board, monkeypatch)
    board.publish(term=1, groups=prompts("a", "b", "c"))
    first = sent.copy()
    for delivery in take(board, "rollout")[:2]:  # a small one and a large one
        assert board.drop(delivery, reason="by_hand", retry=True)
    board.drop_groups(["c"], term=1, reason="by_hand")
    if swept:
        board.sweep(term=1)
    board.publish(term=1, groups=[group("d"), group("e", retry_of="a")])
    assert board._connection.write(first)[-1][0] == 0
    make_overdue(board)
    board.sweep(term=1)
    audit(board)
    board.publish(term=1, groups=[group("f", retry_of="b")])
    loaded = board.load(take(board, "rollout"), ["prompt"])
    assert [found["prompt"] for found in loaded] == [{"text": "prompt of d"}, {"text": "prompt of a"}, "?"]


def test_a_run_that_is_being_deleted_gets_no_garbage(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board = make_board(redis_url)
    run_script, client = side_base.run_script, board._connection.client
    monkeypatch.setattr(payload_transfer, "BYTES_TOGETHER", 1)

    def after_the_state(name, *arguments, **settings):
        if name == "publish":
            client.delete(f"{board.prefix}state")
        return run_script(name, *arguments, **settings)

    monkeypatch.setattr(side_base, "run_script", after_the_state)
    with pytest.raises(RunMissing):
        board.publish(term=1, groups=prompts("a", "b"))
    assert not client.exists(f"{board.prefix}state", f"{board.prefix}garbage", f"{board.prefix}unwanted")


def test_a_transaction_that_is_refused_at_its_end_is_tried_again(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as other, redis.Redis.from_url(redis_url).client() as one:
        one.execute_command("MULTI")
        one.execute_command("SET", "a", 1)
        other.config_set("maxmemory", 1)
        try:
            with pytest.raises(redis.exceptions.ExecAbortError) as refused:
                one.execute_command("EXEC")
        finally:
            other.config_set("maxmemory", 0)
    assert passing(refused.value).startswith("is full (maxmemory)")


def test_a_redis_that_forgot_its_scripts_or_is_full_is_given_no_payloads(redis_url: str) -> None:
    board = make_board(redis_url)
    client: redis.Redis = board._connection.client
    client.script_flush()
    board.publish(term=1, groups=[group("a")])
    audit(board)
    before = keys_of(board)
    client.config_set("maxmemory", 1)
    try:
        board._connection.retry_seconds = 0.1
        with pytest.raises(BoardError):
            board.publish(term=1, groups=[group("b")])
    finally:
        client.config_set("maxmemory", 0)
    assert keys_of(board) == before


def test_a_script_that_fails_is_an_error_in_a_transaction_too(redis_url: str) -> None:
    board = make_board(redis_url)
    with pytest.raises(BoardError, match="Expected value but found"):
        board._run(run_script("publish", board.prefix, *[""] * 7, values=[f"{board.prefix}columns:x:1", b"x"]))
