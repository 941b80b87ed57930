"""The gRPC side of a launcher: what it refuses, whatever its host is."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
import redis

from relaxd.replica.launcher_server import LauncherServicer
from relaxd.rpc.client import channel
from relaxd.rpc.errors import InvalidArgument, field_violations
from relaxd.rpc.leader_term import RedisTerm
from relaxd.rpc.server import start_server
from relaxd.v1 import launcher_pb2 as pb
from relaxd.v1.launcher_pb2_grpc import LauncherStub, add_LauncherServicer_to_server
from services.coordinator.state.store import Store
from tests.kit.redis.redis_server import RedisServer


class Memory:
    """A host that only remembers."""

    roles = frozenset({"rollout"})

    def __init__(self) -> None:
        self.there: dict[str, pb.Instance] = {}

    def launch(self, request: pb.LaunchRequest) -> pb.Instance:
        return self.there.setdefault(request.launch_id, pb.Instance(launch_id=request.launch_id, role=request.role))

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        self.there.pop(launch_id, None)

    def instances(self) -> list[pb.Instance]:
        return list(self.there.values())


LAUNCH_A, LAUNCH_B = (pb.LaunchRequest(launch_id=name, role="rollout") for name in "ab")


@asynccontextmanager
async def serving(host: Memory, redis_url: str) -> AsyncIterator[Callable[[int], LauncherStub]]:
    """Serve a launcher; yields a function that returns the stub of the coordinator of a term."""
    service = (add_LauncherServicer_to_server, LauncherServicer(host), "relaxd.v1.Launcher")
    server = await start_server([service], fence=RedisTerm(redis_url))
    async with AsyncExitStack() as channels:
        try:
            opened = {}
            for term in (0, 1, 2, 5, 2**62):
                opened[term] = await channels.enter_async_context(channel(f"127.0.0.1:{server.port}", term=term))
            yield lambda term: LauncherStub(opened[term])
        finally:
            await server.stop()


async def refusal(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_only_the_newest_coordinator_is_obeyed(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    async with serving(host, redis_url) as coordinator:
        old = store.take_over()
        await coordinator(old).Launch(LAUNCH_A)
        # Another coordinator has begun, and the launcher has not heard from it yet.
        new = store.take_over()
        for call in (
            coordinator(old).Launch(LAUNCH_B),
            coordinator(old).Remove(pb.RemoveRequest(launch_id="a")),
            coordinator(old).Restart(pb.LauncherRestartRequest(instance="a")),
        ):
            error = await refusal(call)
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "coordinator of term 1 was replaced: the newest has 2" in str(error.details())
        assert list(host.there) == ["a"]
        # Neither does a launcher that is restarted obey the old one.
        async with serving(host, redis_url) as restarted:
            error = await refusal(restarted(old).Launch(LAUNCH_B))
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        # Nor one that doesn't say which it is.
        error = await refusal(coordinator(0).Launch(LAUNCH_B))
        assert "/relaxd.v1.Launcher/Launch needs the coordinator's term" in str(error.details())
        await coordinator(new).Remove(pb.RemoveRequest(launch_id="a"))
        assert not (await coordinator(0).ListInstances(pb.ListInstancesRequest())).instances


async def test_no_call_locks_the_coordinator_out(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    async with serving(host, redis_url) as coordinator:
        term = store.take_over()
        for wrong in (2**62, term + 1):
            error = await refusal(coordinator(wrong).Launch(LAUNCH_A))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert f"term is {wrong}: it must be 1, the newest" in str(error.details())
            assert [field for field, _ in field_violations(error)] == ["relaxd-term"]
        await coordinator(term).Launch(LAUNCH_A)
        assert list(host.there) == ["a"]


async def test_a_redis_that_begins_anew_is_no_lock_either(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    async with serving(host, redis_url) as coordinator:
        for _ in range(5):
            term = store.take_over()
        await coordinator(term).Launch(LAUNCH_A)
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        error = await refusal(coordinator(term).Launch(LAUNCH_B))
        assert "it must be 0, the newest" in str(error.details())
        assert "(0: there is none)" in str(error.details())
        await coordinator(store.take_over()).Launch(LAUNCH_B)


async def test_without_redis_nothing_is_started(redis_server: Callable[..., RedisServer]) -> None:
    server = redis_server(append_only=False)
    host = Memory()
    term = Store(server.url).take_over()
    async with serving(host, server.url) as coordinator:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "unknown")
            error = await refusal(coordinator(term).Launch(LAUNCH_A))
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "Redis refuses the launcher's user or password" in str(error.details())
        server.kill()
        error = await refusal(coordinator(term).Launch(LAUNCH_A))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "Redis, which has the coordinator's term, does not answer" in str(error.details())
    assert host.there == {}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"launch_id": "", "role": "rollout"}, {"launch_id"}),
        ({"launch_id": "../a", "role": "rollout"}, {"launch_id"}),
        ({"launch_id": "a", "role": "trainer"}, {"role"}),
        ({"launch_id": "a", "role": "rollout", "sglang_url": "gpu-1:30000"}, {"sglang_url"}),
        ({"launch_id": "a" * 101, "role": "", "gpu_uuids": ["GPU-1", "all"]}, {"launch_id", "role", "gpu_uuids[1]"}),
    ],
)
async def test_wrong_requests_name_their_fields(fields: dict, wrong: set[str]) -> None:
    host = Memory()
    with pytest.raises(InvalidArgument) as refused:
        await LauncherServicer(host).Launch(pb.LaunchRequest(**fields), None)
    assert {field for field, _ in refused.value.violations} == wrong
    assert host.there == {}
