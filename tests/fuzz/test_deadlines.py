"""No call hangs: whoever gives no deadline gets one from the service's settings, whatever it depends on does."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from relaxd.rpc.client import channel_options
from relaxd.rpc.server import start_server
from relaxd.v1 import (
    advantage_pb2_grpc,
    coordinator_pb2_grpc,
    launcher_pb2_grpc,
    replica_pb2_grpc,
    reward_pb2_grpc,
    rollout_pb2_grpc,
    trainer_pb2_grpc,
)
from tests.fuzz.attack import LEFT_OUT, path_of
from tests.fuzz.fleet import Fleet
from tests.fuzz.requests import good_requests

PATIENCE = 60.0
"""A busy machine may be late; a call without any deadline would never end."""
MODULES = {
    "Advantage": advantage_pb2_grpc,
    "Coordinator": coordinator_pb2_grpc,
    "Launcher": launcher_pb2_grpc,
    "Replica": replica_pb2_grpc,
    "Reward": reward_pb2_grpc,
    "Rollout": rollout_pb2_grpc,
    "Trainer": trainer_pb2_grpc,
}


def methods(service: str) -> list[MethodDescriptor]:
    return list(descriptor_pool.Default().FindServiceByName(f"relaxd.v1.{service}").methods)


async def ended(channel: grpc.aio.Channel, method: MethodDescriptor, request: bytes) -> tuple[str, float, str]:
    """Call without a deadline; the status, the seconds until it came, and what was said."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE):
            if method.server_streaming:
                async for _ in channel.unary_stream(path_of(method), None, None)(request):
                    pass
            else:
                await channel.unary_unary(path_of(method), None, None)(request)
        code, detail = "OK", ""
    except grpc.aio.AioRpcError as error:
        code, detail = error.code().name, error.details() or ""
    except TimeoutError:
        code, detail = "HANGS", ""
    return code, time.monotonic() - begun, detail


def hanging(service: str) -> Any:
    """An implementation whose every call waits for ever."""

    async def unary(self: Any, request: Any, context: Any) -> None:
        await asyncio.Event().wait()

    async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    base = getattr(MODULES[service], f"{service}Servicer")
    calls = {method.name: stream if method.server_streaming else unary for method in methods(service)}
    return type(f"Hanging{service}", (base,), calls)()


@pytest.mark.parametrize("service", MODULES)
async def test_a_handler_that_hangs_is_cut_off(service: str) -> None:
    add = getattr(MODULES[service], f"add_{service}Servicer_to_server")
    registered = (add, hanging(service), f"relaxd.v1.{service}")
    server = await start_server([registered], deadline_seconds=0.2, stream_deadline_seconds=0.3)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=channel_options()) as channel:
            for method in methods(service):
                code, seconds, detail = await ended(channel, method, b"")
                assert (code, "longer than its deadline" in detail) == ("DEADLINE_EXCEEDED", True), (
                    f"{method.full_name}: {detail}"
                )
                assert seconds < PATIENCE
    finally:
        await server.stop()


@contextlib.contextmanager
def frozen(victims: Fleet) -> Iterator[None]:
    """Redis and every process below a service stand still."""
    assert victims.redis.process is not None
    pids = [victims.redis.process.pid]
    for name in victims.attacked:
        parent = psutil.Process(victims.processes[name].pid)
        pids += [child.pid for child in parent.children(recursive=True)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_real_call_hangs_while_everything_behind_the_service_stands_still(victims: Fleet) -> None:
    good = good_requests(victims, int(time.time() * 1000))

    async def call_all() -> dict[str, tuple[str, float, str]]:
        found = {}
        for target in victims.targets:
            async with grpc.aio.insecure_channel(target.address, options=channel_options()) as channel:
                paths = [m for name in target.services for m in methods(name.rpartition(".")[2])]
                paths = [method for method in paths if path_of(method) not in LEFT_OUT]
                requests = [
                    (good[path_of(m)](900) if path_of(m) in good else GetMessageClass(m.input_type)()) for m in paths
                ]
                answers = await asyncio.gather(
                    *(ended(channel, m, r.SerializeToString()) for m, r in zip(paths, requests, strict=True))
                )
                found |= {f"{target.name} {path_of(m)}": answer for m, answer in zip(paths, answers, strict=True)}
        return found

    with frozen(victims):
        found = asyncio.run(call_all())
    hung = {name: answer for name, answer in found.items() if answer[0] in ("HANGS", "UNKNOWN", "INTERNAL")}
    assert not hung
    assert sum(code == "DEADLINE_EXCEEDED" for code, _, _ in found.values()) > 5, "nothing depended on anything"
    victims.wake()
    assert victims.goes_on() > 0
    victims.pause()
