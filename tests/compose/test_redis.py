"""The Redis of the compose files when it is full: it refuses writes, and the kernel leaves it alone."""

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


@pytest.mark.timeout(180)
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
