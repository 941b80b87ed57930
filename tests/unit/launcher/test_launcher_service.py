"""The gRPC side of a launcher: what it refuses, whatever its host is."""

from collections.abc import Callable

import pytest
import redis

from relaxd.rpc.epochs import Epochs
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument, Unavailable
from relaxd.rpc.launcher import LauncherServicer
from relaxd.v1 import launcher_pb2 as pb
from services.coordinator.store import Store
from tests.conftest import RedisServer


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


def launch(launch_id: str, epoch: int) -> pb.LaunchRequest:
    return pb.LaunchRequest(launch_id=launch_id, role="rollout", epoch=epoch)


async def test_only_the_newest_coordinator_is_obeyed(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    service = LauncherServicer(host, Epochs(redis_url))
    old = store.take_over()
    await service.Launch(launch("a", old), None)
    # Another coordinator has begun, and the launcher has not heard from it yet.
    new = store.take_over()
    for call in (
        service.Launch(launch("b", old), None),
        service.Remove(pb.RemoveRequest(launch_id="a", epoch=old), None),
        service.Restart(pb.LauncherRestartRequest(instance="a", epoch=old), None),
    ):
        with pytest.raises(FailedPrecondition, match="coordinator of epoch 1 was replaced: the newest has 2"):
            await call
    assert list(host.there) == ["a"]
    # Neither does a launcher that is restarted obey the old one.
    with pytest.raises(FailedPrecondition):
        await LauncherServicer(host, Epochs(redis_url)).Launch(launch("b", old), None)
    await service.Remove(pb.RemoveRequest(launch_id="a", epoch=new), None)
    assert (await service.List(pb.ListRequest(), None)).instances == []


async def test_no_call_locks_the_coordinator_out(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    service = LauncherServicer(host, Epochs(redis_url))
    epoch = store.take_over()
    for wrong in (2**62, epoch + 1):
        with pytest.raises(InvalidArgument, match=f"epoch is {wrong}: it must be 1, the newest") as refused:
            await service.Launch(launch("a", wrong), None)
        assert [field for field, _ in refused.value.violations] == ["epoch"]
    await service.Launch(launch("a", epoch), None)
    assert list(host.there) == ["a"]


async def test_a_redis_that_begins_anew_is_no_lock_either(redis_url: str) -> None:
    host, store = Memory(), Store(redis_url)
    service = LauncherServicer(host, Epochs(redis_url))
    for _ in range(5):
        epoch = store.take_over()
    await service.Launch(launch("a", epoch), None)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with pytest.raises(InvalidArgument, match=r"it must be 0, the newest .* \(0: there is none\)"):
        await service.Launch(launch("b", epoch), None)
    await service.Launch(launch("b", store.take_over()), None)


async def test_without_redis_nothing_is_started(redis_server: Callable[..., RedisServer]) -> None:
    server = redis_server(append_only=False)
    host, epochs = Memory(), Epochs(server.url)
    epoch = Store(server.url).take_over()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "unknown")
        with pytest.raises(FailedPrecondition, match="Redis refuses the launcher's user or password"):
            await LauncherServicer(host, Epochs(server.url)).Launch(launch("a", epoch), None)
    server.kill()
    with pytest.raises(Unavailable, match="Redis, which has the coordinator's epoch, does not answer"):
        await LauncherServicer(host, epochs).Launch(launch("a", epoch), None)
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
        await LauncherServicer(host, Epochs(redis_url)).Launch(pb.LaunchRequest(**fields), None)
    assert {field for field, _ in refused.value.violations} == wrong
    assert host.there == {}
