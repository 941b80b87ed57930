"""Unfinished work that deliveries save: who gets it, and what becomes of it."""

import numpy as np
import pytest

from relaxd.board import Board, Delivery
from tests.kit.boards import LARGE, audit, end_leases, group, make_board, output, take


def part(first: int, count: int = 3) -> dict[str, np.ndarray]:
    return {"tokens": np.arange(first, first + count, dtype=np.int32)}


def held(redis_url: str, **settings: int) -> tuple[Board, Delivery]:
    board = make_board(redis_url, lease_seconds=1000, **settings)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout", "one")
    return board, delivery


def saved_tokens(board: Board, delivery: Delivery) -> list[list[int]]:
    return [list(columns["tokens"]) for columns in board.saved(delivery).parts]  # type: ignore[arg-type]


def test_whoever_takes_the_group_next_gets_all_parts_and_a_commit_ends_them(redis_url: str) -> None:
    board, first = held(redis_url)
    assert board.saved(first).parts == ()
    pointers = board.save(first, part(0), after="")
    assert pointers is not None
    pointers = board.save(first, part(3, LARGE), after=pointers)
    audit(board)
    board.nack("rollout", "one", [first])
    (second,) = take(board, "rollout", "two")
    assert saved_tokens(board, second) == [[0, 1, 2], list(range(3, 3 + LARGE))]
    assert board.saved(second).pointers == pointers

    # The first one can't add to what the second one holds; the second can.
    assert board.save(first, part(9), after=str(pointers)) is None
    assert board.save(second, part(9), after=str(pointers)) is not None
    audit(board)
    assert board.commit([(second, output("rollout"))]) == [True]
    assert board.saved(second).parts == ()
    audit(board)
    assert board.save(second, part(12), after="") is None
    audit(board)


def test_a_save_whose_reply_was_lost_counts_once(redis_url: str) -> None:
    board, delivery = held(redis_url)
    run = board._connection.run
    board._connection.run = lambda operation: (run(operation), run(operation))[1]  # type: ignore[method-assign]
    pointers = board.save(delivery, part(0), after="")
    assert pointers is not None
    assert board.save(delivery, part(3, LARGE), after=pointers) is not None
    assert len(board.saved(delivery).parts) == 2
    audit(board)


def test_what_others_have_saved_or_forgotten_is_not_overwritten(redis_url: str) -> None:
    board, delivery = held(redis_url)
    pointers = board.save(delivery, part(0), after="")
    assert board.save(delivery, part(5), after="") is None
    assert not board.forget_saved(delivery, "a.0")
    assert board.forget_saved(delivery, str(pointers))
    assert board.saved(delivery).parts == ()
    audit(board)
    assert board.save(delivery, part(5), after=str(pointers)) is None
    assert board.save(delivery, part(5), after="") is not None
    assert saved_tokens(board, delivery) == [[5, 6, 7]]


@pytest.mark.parametrize("end", ["drop", "poison", "relieve"])
def test_a_group_that_closes_takes_its_saved_work_along(redis_url: str, end: str) -> None:
    board, delivery = held(redis_url, max_deliveries=1, groups_per_step=1)
    assert board.save(delivery, part(0, LARGE), after="") is not None
    if end == "drop":
        board.drop(delivery, reason="stale", retry=True)
    elif end == "poison":
        board.nack("rollout", "one", [delivery], failed=True)
    else:
        board.publish(term=1, groups=[group("b")])
        client = board._connection.client
        before = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        try:
            assert board.relieve(term=1) == 1
        finally:
            client.config_set("maxmemory", before)
        if "a" in board.open_groups():  # the newest went first
            board.drop_groups(["a"], term=1, reason="memory")
    assert "a" not in board.open_groups()
    audit(board)


@pytest.mark.parametrize("end", ["commit", "forget", "drop"])
def test_nothing_of_saved_work_stays_in_redis(redis_url: str, end: str) -> None:
    board, delivery = held(redis_url)
    client, prefix = board._connection.client, board.prefix
    prompt = client.keys(f"{prefix}columns:*")
    pointers = ""
    for number, count in enumerate((3, LARGE, 3, LARGE)):
        pointers = str(board.save(delivery, part(number, count), after=pointers))
    assert len(client.keys(f"{prefix}columns:*")) == len(prompt) + 4 + 2
    if end == "commit":
        assert board.commit([(delivery, output("rollout"))]) == [True]
    elif end == "forget":
        assert board.forget_saved(delivery, pointers)
    else:
        board.drop(delivery, reason="by hand")
    assert {pointer.decode() for pointer in client.smembers(f"{prefix}garbage")} >= set(pointers.split())
    audit(board)
    board.sweep(term=1)
    audit(board)
    assert not client.exists(f"{prefix}pending", f"{prefix}garbage")
    assert int(client.hget(f"{prefix}state", "garbage_bytes") or 0) == 0
    left = client.keys(f"{prefix}columns:*")
    assert len(left) == {"commit": 2, "forget": 1, "drop": 0}[end], left


def test_a_refused_part_is_garbage_at_once(redis_url: str) -> None:
    board, delivery = held(redis_url)
    client, prefix = board._connection.client, board.prefix
    assert board.save(delivery, part(0), after="") is not None
    before = client.keys(f"{prefix}columns:*")
    assert board.save(delivery, part(0, LARGE), after="") is None
    assert not client.exists(f"{prefix}pending")
    assert board.sweep(term=1) == 1
    assert set(client.keys(f"{prefix}columns:*")) == set(before)
    audit(board)


def test_a_save_that_arrives_again_after_it_was_forgotten_brings_no_garbage_back(redis_url: str) -> None:
    board, delivery = held(redis_url)
    run, sent = board._connection.run, []
    board._connection.run = lambda operation: (sent.append(operation), run(operation))[1]  # type: ignore[method-assign]
    pointers = board.save(delivery, part(0), after="")
    save = sent[-1]
    assert board.forget_saved(delivery, str(pointers))
    run(save)
    assert board.saved(delivery).pointers == ""
    audit(board)


def test_a_delivery_that_saved_much_does_not_make_a_group_poison(redis_url: str) -> None:
    """Groups of long answers meet more dying engines than others."""
    board, delivery = held(redis_url, max_deliveries=2)
    for number in range(5):
        pointers = board.saved(delivery).pointers
        for _ in range(2):  # forgiven once, however often it saves
            pointers = str(board.save(delivery, part(number), after=pointers, forgiven=True))
        if number % 2:
            end_leases(board, "rollout")
        else:
            assert board.reclaim(term=1, consumer=delivery.consumer) == 1
        (delivery,) = take(board, "rollout", f"worker-{number}")
    assert delivery.attempt == 6
    board.save(delivery, part(9), after=board.saved(delivery).pointers)  # a little
    board.nack("rollout", delivery.consumer, [delivery], failed=True)
    (delivery,) = take(board, "rollout", "last")
    board.nack("rollout", "last", [delivery], failed=True)
    assert board.counts().dropped_by_reason == {"poison": 1}
    audit(board)


@pytest.mark.parametrize("damage", ["nonsense", "gone"])
def test_damaged_work_is_named_and_can_be_forgotten(
    redis_url: str, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    board, delivery = held(redis_url)
    pointers = str(board.save(delivery, part(0), after=""))
    key = f"{board.prefix}columns:{pointers}"
    if damage == "gone":
        board._connection.client.delete(key)
    else:
        board._connection.client.set(key, b"nonsense")
    saved = board.saved(delivery)
    assert (saved.pointers, saved.parts) == (pointers, ())
    assert "the saved work of group a is damaged" in caplog.text
    assert board.forget_saved(delivery, pointers)
