"""The gRPC side of a launcher: what it refuses, whatever its host is."""

import pytest

from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from relaxd.rpc.launcher import LauncherServicer
from relaxd.v1 import launcher_pb2 as pb


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


async def test_a_coordinator_of_the_past_is_refused() -> None:
    host = Memory()
    service = LauncherServicer(host)
    await service.Launch(pb.LaunchRequest(launch_id="a", role="rollout", epoch=3), None)
    for call in (
        service.Launch(pb.LaunchRequest(launch_id="b", role="rollout", epoch=2), None),
        service.Remove(pb.RemoveRequest(launch_id="a", epoch=2), None),
    ):
        with pytest.raises(FailedPrecondition, match="epoch 3 was heard: epoch 2 is over"):
            await call
    assert list(host.there) == ["a"]
    await service.Remove(pb.RemoveRequest(launch_id="a", epoch=4), None)
    assert (await service.List(pb.ListRequest(), None)).instances == []


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"launch_id": "", "role": "rollout"}, {"launch_id"}),
        ({"launch_id": "../a", "role": "rollout"}, {"launch_id"}),
        ({"launch_id": "a", "role": "trainer"}, {"role"}),
        ({"launch_id": "a" * 101, "role": "", "gpu_uuids": ["GPU-1", "all"]}, {"launch_id", "role", "gpu_uuids[1]"}),
    ],
)
async def test_wrong_requests_name_their_fields(fields: dict, wrong: set[str]) -> None:
    host = Memory()
    with pytest.raises(InvalidArgument) as refused:
        await LauncherServicer(host).Launch(pb.LaunchRequest(**fields), None)
    assert {field for field, _ in refused.value.violations} == wrong
    assert host.there == {}
