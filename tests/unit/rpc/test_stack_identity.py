"""Calls of another stack are refused, with both identities."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from relaxd.rpc.client import channel
from relaxd.rpc.errors import from_call
from relaxd.rpc.server import start_server
from relaxd.rpc.stack_identity import STACK_IDENTITY, STACK_VARIABLE, make_stack_identity
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorServicer, CoordinatorStub, add_CoordinatorServicer_to_server

OWN = "ours-1"


class Coordinator(CoordinatorServicer):
    async def GetRun(self, request: Any, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse()

    async def Register(self, request: Any, context: Any) -> pb.RegisterResponse:
        return pb.RegisterResponse()

    async def Heartbeat(self, request: Any, context: Any) -> pb.HeartbeatResponse:
        return pb.HeartbeatResponse()


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = await start_server(
        [(add_CoordinatorServicer_to_server, Coordinator(), "relaxd.v1.Coordinator")], stack=OWN, serving=True
    )
    yield f"127.0.0.1:{server.port}"
    await server.stop()


CALLS = ("GetRun", "Register", "Heartbeat")


async def call(address: str, stack: str, method: str) -> None:
    async with channel(address, stack=stack) as to:
        await getattr(CoordinatorStub(to), method)(getattr(pb, f"{method}Request")())


async def refusal(address: str, stack: str, method: str) -> str:
    """Call a method that is refused; returns the message."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(address, stack, method)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert from_call(refused.value).reason == "STACK_MISMATCH"
    return refused.value.details() or ""


@pytest.mark.parametrize("method", CALLS)
async def test_calls_of_another_stack_are_refused(address: str, method: str) -> None:
    told = await refusal(address, "theirs-2", method)
    assert "this is stack ours-1, the caller belongs to stack 'theirs-2'" in told
    await call(address, OWN, method)


async def test_calls_without_identity_are_answered_except_registrations(address: str) -> None:
    await call(address, "", "GetRun")
    await call(address, "", "Heartbeat")
    assert "start the service with RELAXD_STACK=ours-1" in await refusal(address, "", "Register")


def test_each_start_has_an_identity_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(STACK_VARIABLE, raising=False)
    state = tmp_path / "über sweep.1" / ".relaxd"
    one, other = make_stack_identity(state), make_stack_identity(state)
    assert one != other
    assert STACK_IDENTITY.fullmatch(one)
    assert one.startswith("ber-sweep-1-")
    monkeypatch.setenv(STACK_VARIABLE, "fleet-7")
    assert make_stack_identity(state) == "fleet-7"
    monkeypatch.setenv(STACK_VARIABLE, "two words")
    with pytest.raises(ValueError, match="RELAXD_STACK is 'two words': it must be"):
        make_stack_identity(state)
