"""What is said of real servers and of ports."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from relaxd.config.load_toml import load
from relaxd.local.port_holder import SUPERVISOR, PortHolder, ask_stack, find_holder, taken_port
from relaxd.local.state_folder import StateFolder
from relaxd.process.ports import ReservedPort
from relaxd.rpc.server import start_server
from relaxd.rpc.stack_identity import STACK_VARIABLE
from relaxd.tools.doctor import Scope
from relaxd.tools.doctor.services import (
    check_coordinator_port,
    check_redis,
    check_redis_program,
    check_weight_ports,
    fact_findings,
    server_findings,
)
from relaxd.v1.replica_pb2 import GetStatusResponse
from relaxd.v1.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
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


RUN = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
"""
LISTEN = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


class Replica(ReplicaServicer):
    async def GetStatus(self, request: Any, context: Any) -> GetStatusResponse:
        return GetStatusResponse()


def scope(folder: Path, **given: object) -> Scope:
    return Scope(folder=StateFolder(folder), **given)


def test_a_free_port(tmp_path: Path) -> None:
    with ReservedPort("127.0.0.1") as reserved:
        port = reserved.number
    assert find_holder(port) is None
    (finding,) = check_coordinator_port(scope(tmp_path, port=port))
    assert finding.level == "ok"


def test_a_program_is_named_with_its_stack(tmp_path: Path) -> None:
    environment = os.environ | {STACK_VARIABLE: "theirs-1"}
    program = subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        port = int(program.stdout.readline())
        assert f"port {port} on 127.0.0.1 is taken by stack theirs-1 (pid {program.pid}, " in taken_port(port)
        (finding,) = check_coordinator_port(scope(tmp_path, port=port))
        assert (finding.level, finding.how) == ("warning", "relaxd up --port 0")
        assert f"held by stack theirs-1 (pid {program.pid}" in finding.found
        (known,) = check_coordinator_port(scope(tmp_path, port=port, coordinator=f"127.0.0.1:{port}"))
        assert known.level == "ok"
    finally:
        program.communicate()


def test_what_ending_a_stack_here_would_end_is_said(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    program = subprocess.Popen(
        [sys.executable, "-c", LISTEN, SUPERVISOR, str(theirs / "plan.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        (finding,) = check_coordinator_port(scope(tmp_path, port=int(program.stdout.readline())))
    finally:
        program.communicate()
    assert finding.how == f"relaxd down --state {theirs}"
    assert finding.right.endswith("; `relaxd down` ends what runs there")


def test_a_reservation_has_a_holder() -> None:
    with ReservedPort("127.0.0.1") as reserved:
        holder = find_holder(reserved.number)
    assert holder is not None
    assert holder.pid == os.getpid()


async def test_a_server_of_another_user_says_its_stack() -> None:
    replica = (add_ReplicaServicer_to_server, Replica(), "relaxd.v1.Replica")
    server = await start_server([replica], stack="theirs-2", serving=True)
    try:
        told = await asyncio.to_thread(ask_stack, f"127.0.0.1:{server.port}", 5.0)
    finally:
        await server.stop()
    assert str(PortHolder(stack=told)) == "stack theirs-2 (another user's process)"


def test_a_program_that_speaks_no_grpc_is_of_no_stack() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ask_stack(f"127.0.0.1:{server.getsockname()[1]}", 0.2) == ""


def test_ports_for_weights_must_be_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        first = one.getsockname()[1]
        last = first + 1 if first < 65535 else first - 1
        ports = f"{min(first, last)}-{max(first, last)}"
        config = load(RUN + f'\nweights.ports = "{ports}"')
        (finding,) = check_weight_ports(scope(tmp_path, config=config))
    assert finding.level == "problem"
    assert "of 2 are free" in finding.found
    assert not list(check_weight_ports(scope(tmp_path, config=load(RUN))))
