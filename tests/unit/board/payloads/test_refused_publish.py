"""A publish that is refused, or comes again, leaves no payload: they are set in one transaction with its script."""

import numpy as np
import pytest
import redis

from relaxd.board import Board, BoardError, Fenced, GateClosed, NewGroup, RunMissing
from relaxd.board.connections.scripts import run_script
from tests.kit.boards import audit, group, make_board, make_overdue
from tests.unit.board.payloads.test_board_payloads import LARGE


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
    assert board.counts().published == 0


def test_what_comes_again_after_it_was_swept_leaves_nothing(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board = make_board(redis_url)
    write, sent = board._connection.write, []
    monkeypatch.setattr(board._connection, "write", lambda commands: sent.append(commands) or write(commands))
    board.publish(term=1, groups=[group("a"), group("b")])
    board.drop_groups(["a"], term=1, reason="by_hand")
    board.sweep(term=1)
    before = keys_of(board)
    for _ in range(2):
        assert write(sent[0])[-1][0] == 0
        assert keys_of(board) == before
        audit(board)


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
