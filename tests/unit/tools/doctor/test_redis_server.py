"""What is said of real servers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from relaxd.local.state_folder import StateFolder
from relaxd.tools.doctor.finding import Scope
from relaxd.tools.doctor.redis_server import check_redis, check_redis_program, fact_findings, server_findings
from tests.kit.redis.redis_server import RedisServer

NO_EVICTION = "redis-cli CONFIG SET maxmemory-policy noeviction"
GOOD = ("--maxmemory", "100mb")


def test_a_server_as_it_should_be(redis_server: Callable[..., RedisServer]) -> None:
    (finding,) = server_findings("Redis", redis_server(options=GOOD).url, 5.0)
    assert finding.level == "ok"
    assert "of 105 MB used, noeviction, append-only file" in finding.found


@pytest.mark.parametrize(
    ("options", "append_only", "expected"),
    [
        (GOOD, False, [("warning", "redis-cli CONFIG SET appendonly yes")]),
        (("--maxmemory-policy", "allkeys-lru", *GOOD), True, [("problem", NO_EVICTION)]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_server(
    redis_server: Callable[..., RedisServer],
    options: tuple[str, ...],
    append_only: bool,
    expected: list[tuple[str, str]],
) -> None:
    server = redis_server(append_only=append_only, options=options)
    findings = list(server_findings("Redis", server.url, 5.0))
    assert [(one.level, one.how) for one in findings] == expected
    assert all(f"127.0.0.1:{server.port}" in one.found for one in findings)


def test_the_commands_repair_a_server(redis_server: Callable[..., RedisServer]) -> None:
    server = redis_server(append_only=False, options=("--maxmemory-policy", "allkeys-lru"))
    commands = [finding.how for finding in server_findings("Redis", server.url, 5.0)]
    assert len(commands) == 3
    with redis.Redis.from_url(server.url, socket_timeout=10.0) as client:
        for command in commands:
            client.execute_command(*command.split()[1:])
    assert [one.level for one in server_findings("Redis", server.url, 5.0)] == ["ok"]


def test_an_old_server_and_a_replica_are_problems() -> None:
    facts = {
        "redis_version": "6.2.1",
        "role": "master",
        "maxmemory_policy": "noeviction",
        "maxmemory": 1,
        "aof_enabled": 1,
    }
    assert [one.level for one in fact_findings("Redis", "here", facts)] == ["problem"]
    assert [one.level for one in fact_findings("Redis", "here", facts | {"role": "slave"})] == ["problem"] * 2
    assert not list(fact_findings("Redis", "here", facts | {"valkey_version": "9.1.0"}))
    assert not list(fact_findings("data node", "here", facts | {"redis_version": "7.0.0", "aof_enabled": 0}))


def test_the_redis_that_is_given_is_checked(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = Scope(folder=StateFolder(tmp_path), patience_seconds=0.3)
    monkeypatch.setenv("REDIS_URL", redis_url)
    assert "problem" not in {one.level for one in check_redis(scope)}
    assert not list(check_redis_program(scope))
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    (finding,) = check_redis(scope)
    assert finding.level == "problem"
    assert "Redis at 127.0.0.1:1 does not answer" in finding.found
    assert "secret" not in finding.found
    monkeypatch.delenv("REDIS_URL")
    (program,) = check_redis_program(scope)
    assert program.level == "ok"
    monkeypatch.setenv("RELAXD_REDIS_MAXMEMORY", "much")
    (program,) = check_redis_program(scope)
    assert program.level == "problem"
