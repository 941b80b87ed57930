"""The Redis of the compose files when it is full: it refuses writes, and the kernel leaves it alone."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.stack import Stack
from tests.kit.waiting import wait_until

ADD_A_MEGABYTE = "return redis.call('SET', 'filler:' .. redis.call('INCR', 'fillers'), string.rep('x', 1048576))"


@pytest.fixture
def small(engine: None, tmp_path: Path) -> Iterator[Stack]:
    """A project of which only Redis is up, and may hold 64 MB."""
    stack = Stack(f"relaxd-redis-{os.getpid()}", tmp_path, {"REDIS_MAXMEMORY": "64mb", "REDIS_MEMORY": "192m"})
    try:
        stack.compose("up", "--detach", "--wait", "redis")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")


@pytest.mark.timeout(600)
def test_data_nodes_are_servers_of_their_own_with_the_boards_password(engine: None, tmp_path: Path) -> None:
    files = {"COMPOSE_FILE": "compose.yaml:compose.data.yaml", "REDIS_MAXMEMORY": "64mb", "REDIS_MEMORY": "192m"}
    stack = Stack(f"relaxd-data-{os.getpid()}", tmp_path, files)
    nodes = ("redis", "data-1", "data-2")

    def ask(name: str, *words: str) -> str:
        command = 'REDISCLI_AUTH=$(cat /run/relaxd/redis_password) exec redis-cli -h "$@"'
        return stack.compose("exec", "--no-TTY", "redis", "sh", "-c", command, "sh", name, *words).strip()

    try:
        stack.compose("up", "--detach", "--wait", *nodes)
        for name in nodes:
            assert ask(name, "SET", "name", name) == "OK"
        assert [ask(name, "GET", "name") for name in nodes] == list(nodes)
        for name in nodes:
            assert ask(name, "CONFIG", "GET", "maxmemory-policy").split() == ["maxmemory-policy", "noeviction"]
        stack.compose("restart", "data-1")
        stack.compose("up", "--detach", "--wait", "data-1")
        assert ask("data-1", "GET", "name") == "data-1"  # its append-only file is on a volume of its own
        (container,) = stack.containers("data-1")
        assert "data-1" in json.dumps(container["Mounts"])
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")


@pytest.mark.timeout(600)
def test_a_full_redis_refuses_writes_and_is_not_killed(small: Stack) -> None:
    def ask(*words: str) -> str:
        command = 'REDISCLI_AUTH=$(cat /run/relaxd/redis_password) exec redis-cli "$@"'
        return small.compose("exec", "--no-TTY", "redis", "sh", "-c", command, "sh", *words)

    answers = [line for line in ask("-r", "80", "EVAL", ADD_A_MEGABYTE, "0").splitlines() if line]
    assert 32 < answers.count("OK") < 64
    assert answers[-1].startswith("OOM command not allowed when used memory > 'maxmemory'")
    # The copy that rewriting the append-only file makes fits beside it.
    ask("BGREWRITEAOF")
    wait_until(lambda: "aof_rewrites:1" in ask("INFO", "persistence"), "the file is rewritten")
    wait_until(lambda: "aof_rewrite_in_progress:0" in ask("INFO", "persistence"), "the file is rewritten")
    assert "aof_last_bgrewrite_status:ok" in ask("INFO", "persistence")
    # Reading and making room go on.
    assert ask("DEL", "filler:1").strip() == "1"
    (container,) = small.containers("redis")
    assert (container["State"]["Status"], container["State"]["OOMKilled"], container["RestartCount"]) == (
        "running",
        False,
        0,
    )
