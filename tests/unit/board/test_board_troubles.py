"""Troubles of Redis that pass are waits that say what they wait for: none ends a process, nothing is lost."""

import contextlib
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
import redis

from relaxd.board import Board, BoardUnavailable
from services.coordinator.state.store import Store, StoreUnavailable
from tests.kit.boards import audit, group, make_board, output, take
from tests.kit.redis.redis_server import RedisServer
from tests.kit.waiting import wait_until

PATIENCE = 10.0


def says(board: Board, words: str) -> None:
    """A board that is out of patience names the trouble."""
    patience, board._connection.retry_seconds = board._connection.retry_seconds, 0.1
    with pytest.raises(BoardUnavailable, match=words):
        board.publish(term=1, groups=[group("impatient")])
    board._connection.retry_seconds = patience


@contextlib.contextmanager
def meanwhile(repair: Callable[[], object]) -> Iterator[None]:
    """Repair the trouble while an operation waits."""
    timer = threading.Timer(0.3, repair)
    timer.start()
    yield
    timer.join()


def test_a_disk_that_is_full_is_waited_for(redis_server):
    server: RedisServer = redis_server(append_only=True)
    board = make_board(server.url, retry_seconds=PATIENCE)
    board.publish(term=1, groups=[group("before")])
    (delivery,) = take(board, "rollout")
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    grown = max((file.stat().st_size for file in (server.folder / "appendonlydir").iterdir()), default=0)
    process.rlimit(psutil.RLIMIT_FSIZE, (grown + 4096, resource.RLIM_INFINITY))

    def writes_fail() -> bool:
        with contextlib.suppress(redis.RedisError):
            board._connection.client.set("filler", "x" * 8192)
        return bool(board._connection.client.info("persistence")["aof_last_write_status"] != "ok")

    wait_until(writes_fail)
    says(board, "can't write to its disk: ")
    with meanwhile(lambda: process.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))):
        assert board.commit([(delivery, output("rollout"))]) == [True]
    board._connection.client.delete("filler")
    server.restart()
    assert board.open_groups() == ["before"]
    audit(board)


def test_a_primary_that_was_demoted_and_comes_back_is_waited_for(redis_server):
    primary, other = redis_server(append_only=False), redis_server(append_only=False)
    board = make_board(primary.url, retry_seconds=PATIENCE)
    store = Store(primary.url)
    store.take_over()
    board.publish(term=1, groups=[group("before")])
    with redis.Redis.from_url(primary.url) as one, redis.Redis.from_url(other.url) as two:
        for client in (one, two):
            client.config_set("repl-diskless-sync-delay", 0)
        two.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: two.info("replication").get("master_link_status") == "up")
        one.wait(1, 5000)
        two.replicaof("NO", "ONE")
        blocked = threading.Thread(target=lambda: board.take("reward", "waits", count=1, block_seconds=2.0))
        blocked.start()  # is woken up by the demotion, and reads again
        one.replicaof("127.0.0.1", other.port)
        wait_until(lambda: one.info("replication").get("master_link_status") == "up")
        says(board, "is a replica now, not the primary: ")
        with pytest.raises(StoreUnavailable, match="Redis is a replica now"):
            store.begin_delete("nothing")
        with meanwhile(lambda: one.replicaof("NO", "ONE")):
            board.publish(term=1, groups=[group("after")])
        blocked.join(timeout=PATIENCE)
        assert not blocked.is_alive()
    assert board.open_groups() == ["after", "before"]
    audit(board)


def test_a_script_that_runs_too_long_is_waited_for(redis_server):
    server = redis_server(append_only=False)
    board = make_board(server.url, retry_seconds=PATIENCE)
    client = redis.Redis.from_url(server.url, socket_timeout=PATIENCE)
    client.config_set("busy-reply-threshold", 50)

    def is_busy() -> bool:
        try:
            return not client.ping()
        except redis.ResponseError as error:
            return "busy" in str(error).lower()

    def run() -> None:
        with contextlib.suppress(redis.ResponseError):  # it is killed
            redis.Redis.from_url(server.url, socket_timeout=PATIENCE).eval("while true do end", 0)

    busy = threading.Thread(target=run)
    busy.start()
    wait_until(is_busy, "the script keeps Redis busy")
    says(board, "is busy with a script: ")
    with meanwhile(client.script_kill):
        board.publish(term=1, groups=[group("a")])
    busy.join(timeout=PATIENCE)
    assert board.open_groups() == ["a"]
    audit(board)


def test_replicas_that_are_missing_are_waited_for(redis_server):
    board = make_board(redis_server(append_only=False).url, retry_seconds=PATIENCE)
    client = board._connection.client
    client.config_set("min-replicas-to-write", 1)
    says(board, "has too few replicas to take writes")
    with meanwhile(lambda: client.config_set("min-replicas-to-write", 0)):
        board.publish(term=1, groups=[group("a")])
    audit(board)


def test_a_redis_that_was_full_goes_on(redis_server):
    board = make_board(redis_server(append_only=False).url, retry_seconds=PATIENCE)
    client = board._connection.client
    client.config_set("maxmemory", 1)
    says(board, "is full")
    with meanwhile(lambda: client.config_set("maxmemory", 0)):
        board.publish(term=1, groups=[group("a")])
    audit(board)


def test_a_frozen_redis_is_waited_for(redis_server):
    server = redis_server(append_only=False)
    board = make_board(server.url, timeout_seconds=0.3, retry_seconds=PATIENCE)
    assert server.process is not None
    process: subprocess.Popen[bytes] = server.process
    process.send_signal(signal.SIGSTOP)
    with meanwhile(lambda: process.send_signal(signal.SIGCONT)):
        board.publish(term=1, groups=[group("a")])
    audit(board)
