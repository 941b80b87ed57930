"""Who holds a port: a program, a reservation, a server of a stack."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from relaxd.config.load_toml import load
from relaxd.local.port_holder import SUPERVISOR, PortHolder, ask_stack, find_holder, taken_port
from relaxd.local.state_folder import StateFolder
from relaxd.process.ports import ReservedPort
from relaxd.rpc.server import start_server
from relaxd.rpc.stack_identity import STACK_VARIABLE
from relaxd.tools.doctor.finding import Scope
from relaxd.tools.doctor.ports import check_coordinator_port, check_weight_ports
from relaxd.v1.replica_pb2 import GetStatusResponse
from relaxd.v1.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server

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
