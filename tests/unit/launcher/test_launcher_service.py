"""The gRPC side of a launcher: what it refuses, whatever its host is."""

from collections.abc import Callable

import pytest
import redis

from relaxd.launcher.server import LauncherServicer
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument, Unavailable
from relaxd.rpc.terms import Terms
from relaxd.v1 import launcher_pb2 as pb
from services.coordinator.state.store import Store
from tests.kit.redis_server import RedisServer


class Memory:
    """A host that only remembers."""

    roles = frozenset({"rollout"})

    def __init__(self) -> None:
        self.there: dict[str, pb.Instance] = {}

    def launch(self, launch_id: str, role: str, gpu_uuids: tuple[str, ...]) -> pb.Instance:
        return self.there.setdefault(launch_id, pb.Instance(launch_id=launch_id, role=role, detail=str(gpu_uuids)))

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        self.there.pop(launch_id, None)

    def instances(self) -> list[pb.Instance]:
        return list(self.there.values())


def launch(launch_id: str, term: int) -> pb.LaunchRequest:
    return pb.LaunchRequest(launch_id=launch_id, role="rollout", term=term)


async def test_only_the_newest_coordinator_is_obeyed(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    service = LauncherServicer(host, Terms(redis_url))
    old = store.take_over()
    await service.Launch(launch("a", old), None)
    # Another coordinator has begun, and the launcher has not heard from it yet.
    new = store.take_over()
    for call in (
        service.Launch(launch("b", old), None),
        service.Remove(pb.RemoveRequest(launch_id="a", term=old), None),
        service.Restart(pb.LauncherRestartRequest(instance="a", term=old), None),
    ):
        with pytest.raises(FailedPrecondition, match="coordinator of term 1 was replaced: the newest has 2"):
            await call
    assert list(host.there) == ["a"]
    # Neither does a launcher that is restarted obey the old one.
    with pytest.raises(FailedPrecondition):
        await LauncherServicer(host, Terms(redis_url)).Launch(launch("b", old), None)
    await service.Remove(pb.RemoveRequest(launch_id="a", term=new), None)
    assert (await service.List(pb.ListRequest(), None)).instances == []


async def test_no_call_locks_the_coordinator_out(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    service = LauncherServicer(host, Terms(redis_url))
    term = store.take_over()
    for wrong in (2**62, term + 1):
        with pytest.raises(InvalidArgument, match=f"term is {wrong}: it must be 1, the newest") as refused:
            await service.Launch(launch("a", wrong), None)
        assert [field for field, _ in refused.value.violations] == ["term"]
    await service.Launch(launch("a", term), None)
    assert list(host.there) == ["a"]


async def test_a_redis_that_begins_anew_is_no_lock_either(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    service = LauncherServicer(host, Terms(redis_url))
    for _ in range(5):
        term = store.take_over()
    await service.Launch(launch("a", term), None)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with pytest.raises(InvalidArgument, match=r"it must be 0, the newest .* \(0: there is none\)"):
        await service.Launch(launch("b", term), None)
    await service.Launch(launch("b", store.take_over()), None)


async def test_without_redis_nothing_is_started(redis_server: Callable[..., RedisServer]) -> None:
    server = redis_server(append_only=False)
    host, terms = Memory(), Terms(server.url)
    term = Store(server.url).take_over()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "unknown")
        with pytest.raises(FailedPrecondition, match="Redis refuses the launcher's user or password"):
            await LauncherServicer(host, Terms(server.url)).Launch(launch("a", term), None)
    server.kill()
    with pytest.raises(Unavailable, match="Redis, which has the coordinator's term, does not answer"):
        await LauncherServicer(host, terms).Launch(launch("a", term), None)
    assert host.there == {}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"launch_id": "", "role": "rollout"}, {"launch_id"}),
        ({"launch_id": "../a", "role": "rollout"}, {"launch_id"}),
        ({"launch_id": "a", "role": "trainer"}, {"role"}),
        ({"launch_id": "a" * 101, "role": "", "gpu_uuids": ["GPU-1", "all"]}, {"launch_id", "role", "gpu_uuids[1]"}),
    ],
)
async def test_wrong_requests_name_their_fields(redis_url: str, fields: dict, wrong: set[str]) -> None:
    host = Memory()
    with pytest.raises(InvalidArgument) as refused:
        await LauncherServicer(host, Terms(redis_url)).Launch(pb.LaunchRequest(**fields), None)
    assert {field for field, _ in refused.value.violations} == wrong
    assert host.there == {}
