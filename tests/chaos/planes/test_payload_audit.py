"""The auditor of payloads notices what is lost or leaks, and says nothing when all is well."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from relaxd.board import Board
from relaxd.board.attempts import all_places
from relaxd.board.scripts import run_script
from tests.chaos.planes.payloads import Payloads
from tests.kit.boards import advance, group, make_board, make_overdue, output, payload_keys, take
from tests.kit.redis.redis_server import RedisServer


@pytest.fixture
def board(redis_url: str) -> Board:
    """One group with its answers, one that was dropped and waits, one attempt that is being written."""
    board = make_board(redis_url, large_column_bytes=1)
    board.publish(term=1, groups=[group("a")])
    advance(board, ["rollout"])
    board.publish(term=1, groups=[group("b"), group("c")])
    held = take(board, "rollout", "one", 2)
    board.save(held[0], output("rollout"), after="")
    board.drop_groups(["c"], term=1, reason="stale", retry=True)
    board.sweep(term=1)
    board._run(run_script("register", board.prefix, 60_000, "b", "rollout", "b.half:8,tokens:12:1"))
    board._connection.client.set(f"{board.prefix}columns:b.half:8:tokens:0", b"half", px=60_000)
    return board


def payloads_of(board: Board) -> Payloads:
    return Payloads(board._connection.client, board.run_id, seconds=0.3)


def pointer_of(board: Board, field: str, group_id: str = "a") -> str:
    found: bytes | None = board._connection.client.hget(f"{board.prefix}group:{group_id}", field)
    assert found is not None
    return found.decode()


def test_a_board_in_order(board: Board) -> None:
    payloads = payloads_of(board)
    assert payloads.audit() == []
    assert payloads.most["payloads"] > 6
    assert payloads.most["pending"] == 1
    assert payloads.end() == ["the run is over, and there is pending"]
    for group_id in board.open_groups():
        board.drop_groups([group_id], term=1, reason="the end")
    board.purge(term=1)
    assert payloads.end() == []


def lose(board: Board, client: redis.Redis) -> None:
    client.delete(payload_keys(board.prefix, pointer_of(board, "@rollout"))[1])


def expire(board: Board, client: redis.Redis) -> None:
    client.pexpire(payload_keys(board.prefix, pointer_of(board, "@publish"))[0], 60_000)


def lose_a_saved_part(board: Board, client: redis.Redis) -> None:
    client.delete(*payload_keys(board.prefix, pointer_of(board, "saved:rollout", "b")))


def lose_a_prompt_that_waits(board: Board, client: redis.Redis) -> None:
    (retry,) = client.hvals(f"{board.prefix}retries")
    client.delete(*payload_keys(board.prefix, retry.split(b"|")[1].decode()))


def forget_a_pointer(board: Board, client: redis.Redis) -> None:
    client.hdel(f"{board.prefix}group:a", "@rollout")


def forget_a_registration(board: Board, client: redis.Redis) -> None:
    client.persist(f"{board.prefix}columns:b.half:8:tokens:0")


def leave_garbage(board: Board, client: redis.Redis) -> None:
    board.drop_groups(["a"], term=1, reason="stale")


def leave_it_pending(board: Board, client: redis.Redis) -> None:
    make_overdue(board)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose, "1 payloads are gone"),
        (expire, "1 payloads expire"),
        (lose_a_saved_part, "3 payloads are gone"),
        (lose_a_prompt_that_waits, "3 payloads are gone"),
        (forget_a_pointer, "3 payloads leak"),
        (forget_a_registration, "1 payloads leak"),
        (leave_garbage, "are still garbage after 0.3 s"),
        (leave_it_pending, "1 attempts are still overdue after 0.3 s"),
    ],
)
def test_what_is_lost_or_leaks(board: Board, damage: Callable[[Board, redis.Redis], None], said: str) -> None:
    damage(board, board._connection.client)
    (wrong,) = payloads_of(board).audit()
    assert said in wrong


@pytest.fixture
def on_nodes(redis_url: str, tmp_path: Path) -> Iterator[tuple[Board, Payloads]]:
    """As `board`, on two data nodes, without what waits."""
    with ExitStack() as end:
        servers = []
        for number in range(2):
            (place := tmp_path / str(number)).mkdir()
            servers.append(RedisServer(place).start())
            end.callback(servers[-1].stop)
        board = make_board(redis_url, large_column_bytes=1, data_urls=tuple(server.url for server in servers))
        board.publish(term=1, groups=[group("a"), group("b")])
        advance(board, ["rollout"])
        nodes = [end.enter_context(redis.Redis.from_url(server.url)) for server in servers]
        yield board, Payloads(board._connection.client, board.run_id, seconds=0.3, nodes=nodes)


def on_a_node(board: Board) -> tuple[int, str]:
    placed = all_places(board.prefix, pointer_of(board, "@rollout"))
    return next((place.node, place.keys[0]) for place in placed if place.node is not None)


def test_payloads_on_data_nodes_in_order(on_nodes: tuple[Board, Payloads]) -> None:
    board, payloads = on_nodes
    assert payloads.audit() == []
    node, key = on_a_node(board)
    assert payloads.nodes[node].exists(key)
    for group_id in board.open_groups():
        board.drop_groups([group_id], term=1, reason="the end")
    board.purge(term=1)
    assert payloads.end() == []
    assert not payloads.nodes[node].exists(key)


def test_a_payload_that_a_data_node_has_lost(on_nodes: tuple[Board, Payloads]) -> None:
    board, payloads = on_nodes
    node, key = on_a_node(board)
    payloads.nodes[node].delete(key)
    (wrong,) = payloads.audit()
    assert "1 payloads are gone" in wrong


def test_payloads_that_leak_on_data_nodes(on_nodes: tuple[Board, Payloads]) -> None:
    board, payloads = on_nodes
    forget_a_pointer(board, board._connection.client)
    (wrong,) = payloads.audit()
    assert "payloads leak" in wrong
