"""A primary with a replica, watched by a Sentinel: what follows a failover, what waits, and that nothing is lost."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from benchmarks.failover import campaign
from relaxd.board import AsyncBoard, BoardUnavailable
from relaxd.config import BoardConfig
from relaxd.local.embedded_redis import wait_until_up
from relaxd.redis_client.lookups import mark_key
from relaxd.rpc.leader_term import RedisTerm
from services.coordinator import __main__ as program
from services.coordinator.state.store import Store, StoreUnavailable
from tests.kit.boards import STAGES, audit, group, make_board
from tests.kit.redis.sentinels import WatchedRedis
from tests.kit.waiting import wait_until

PATIENCE = 60.0


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRedis]:
    servers = WatchedRedis(tmp_path_factory.mktemp("redis"))
    try:
        yield servers.start()
    finally:
        servers.stop()


@pytest.mark.night
async def test_everybody_leaves_a_demoted_primary(watched: WatchedRedis) -> None:
    board, store, term = make_board(watched.url, retry_seconds=PATIENCE), Store(watched.url), RedisTerm(watched.url)
    before = program.connect(watched.url).term
    blocked = threading.Thread(target=lambda: board.take("reward", "waits", count=1, block_seconds=2.0))
    blocked.start()
    watched.hand_over()
    board.publish(term=1, groups=[group("after")])
    wait_until(store.take_over, forgive=(StoreUnavailable,))
    assert store.term > before
    await term.check(store.term)
    blocked.join(timeout=PATIENCE)
    assert not blocked.is_alive()
    assert board.open_groups() == ["after"]
    audit(board)


@pytest.mark.night
async def test_a_board_in_the_event_loop_follows_the_primary(watched: WatchedRedis) -> None:
    make_board(watched.url, run_id="loop", retry_seconds=PATIENCE)
    board = AsyncBoard(watched.url, "loop", STAGES, BoardConfig(), retry_seconds=PATIENCE)
    blocked = asyncio.create_task(board.take("reward", "waits", count=1, block_seconds=2.0))
    await board.publish(term=1, groups=[group("before")])
    await asyncio.to_thread(watched.hand_over)
    await board.publish(term=1, groups=[group("after")])
    assert await blocked == []
    assert await board.open_groups() == ["after", "before"]
    await asyncio.to_thread(watched.await_replica)
    board._connection.retry_seconds, board._connection.timeout_seconds = 0.0, 1.0
    too_few = "too few replicas to take writes: NOREPLICAS 0 of 1 replicas"
    with watched.lag(cut=False), pytest.raises(BoardUnavailable, match=too_few):
        await board.publish(term=1, groups=[group("late")])
    await board.close()


def test_a_server_that_says_readonly_is_left_for_the_one_that_the_sentinels_name(watched: WatchedRedis) -> None:
    board = make_board(watched.url, run_id="readonly", retry_seconds=PATIENCE)
    pool = board._connection.client.connection_pool
    connection = pool.get_connection()
    with redis.Redis.from_url(watched.primary.url) as primary, redis.Redis.from_url(watched.replica.url) as replica:
        replica.replicaof("NO", "ONE")
        primary.replicaof("127.0.0.1", watched.replica.port)
        connection.send_command("SET", "a", 1)
        with pytest.raises(redis.ConnectionError, match=r"READONLY 127.0.0.1:\d+ was demoted: the Sentinels are asked"):
            connection.read_response()
        with pytest.raises(redis.ConnectionError, match=r"READONLY .*which the Sentinels named a moment ago"):
            connection.connect()  # the Sentinel doesn't know yet
        primary.replicaof("NO", "ONE")
        replica.replicaof("127.0.0.1", watched.primary.port)
    pool.release(connection)
    watched.await_replica()
    board.publish(term=1, groups=[group("after")])


def test_a_write_counts_only_once_a_replica_has_it(watched: WatchedRedis) -> None:
    board = make_board(watched.url, run_id="waits", timeout_seconds=1.0, retry_seconds=PATIENCE)
    off = make_board(watched.url + "?wait_replicas=0", run_id="off")
    store = Store(watched.url, timeout_seconds=1.0)
    wait_until(store.take_over, forgive=(StoreUnavailable,))
    with watched.lag(cut=False):
        board._connection.retry_seconds = 0.0
        for _ in range(2):  # the second finds the work done and writes nothing, but doesn't count either
            with pytest.raises(BoardUnavailable, match="too few replicas to take writes: NOREPLICAS 0 of 1 replicas"):
                board.publish(term=1, groups=[group("a")])
        with pytest.raises(StoreUnavailable, match="too few replicas to take writes"):
            store.check()
        assert board.open_groups() == ["a"]
        off.publish(term=1, groups=[group("a")])
    board._connection.retry_seconds = PATIENCE
    assert board.publish(term=1, groups=[group("a")]) == ["a"]
    audit(board)


def test_a_primary_that_lacks_acknowledged_writes_is_reported(
    watched: WatchedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    board = make_board(watched.url, run_id="lost", retry_seconds=PATIENCE)
    with redis.Redis.from_url(watched.primary.url) as primary:
        board.publish(term=1, groups=[group("a")])
        assert "has lost writes" not in caplog.text
        mark = int(primary.get(mark_key("lost")) or b"")
        primary.set(mark_key("lost"), mark - 2)  # as of a server that was promoted before it had all
    board.publish(term=1, groups=[group("b")])
    assert f"has lost writes that 1 replicas had (mark {mark - 1} came after {mark})" in caplog.text
    caplog.clear()
    board.publish(term=1, groups=[group("c")])
    assert "has lost writes" not in caplog.text


def test_what_sentinels_cannot_tell_is_said(watched: WatchedRedis) -> None:
    with pytest.raises(Exception, match=r"has no primary.*watches no 'other'") as caught:
        make_board(watched.url.replace("/relaxd/", "/other/"), retry_seconds=0.1)
    assert isinstance(caught.value, BoardUnavailable)
    with pytest.raises(Exception, match="does not answer: NOPRIMARY no Sentinel names one"):
        wait_until_up("redis+sentinel://127.0.0.1:1/relaxd", seconds=0)


@pytest.mark.slow
def test_failovers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = campaign(tmp_path, 2)
    assert found.lost == []
    assert len(found.without_progress) == 2
    assert found.groups > 20
