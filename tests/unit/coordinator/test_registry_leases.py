"""When the coordinator takes a replica for gone, and when it gives its GPUs to others: by a clock of the test's own."""

import pytest

from relaxd.roles import JUDGE, ROLLOUT
from relaxd.rpc.errors import NotFound, ResourceExhausted, Unavailable
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ReplicaStatus
from services.coordinator.fleet.registry import Registry
from services.coordinator.state.store import AsyncStore, Store

GPUS = ["GPU-a", "GPU-b"]
LEASE, GPU_LEASE = 6.0, 60.0


class Time:
    """A clock, and the registries that look at it."""

    def __init__(self, redis_url: str) -> None:
        self.now = 1000.0
        self._redis_url = redis_url

    def coordinator(self) -> Registry:
        """A coordinator that begins now, where the one before ended."""
        store = Store(self._redis_url)
        store.take_over()
        registry = Registry(
            AsyncStore(store),
            lease_seconds=LEASE,
            heartbeat_seconds=1.0,
            gpu_lease_seconds=GPU_LEASE,
            clock=lambda: self.now,
        )
        registry.load(store.replicas(), store.gpu_holders())
        return registry

    async def passes(self, seconds: float, registry: Registry, *alive: str) -> None:
        """Time passes; those who are alive are heard of every second, and a second passes beyond the last look."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for replica_id in alive:
                assert beat(registry, replica_id)
            await registry.expire()


def beat(registry: Registry, replica_id: str) -> bool:
    return registry.heartbeat(replica_id, ReplicaStatus(state=REPLICA_STATE_READY)) is not None


async def register(registry: Registry, replica_id: str, instance: str = "", role: str = ROLLOUT) -> None:
    await registry.register(Registration(replica_id=replica_id, role=role, address="127.0.0.1:9", instance=instance))


@pytest.fixture
def time(redis_url: str) -> Time:
    return Time(redis_url)


async def test_work_goes_to_others_after_one_lease_and_gpus_after_the_other(time: Time) -> None:
    registry = time.coordinator()
    for name in ("cut-off", "next"):
        await register(registry, name)
    assert await registry.lease_gpus("cut-off", GPUS, 2) == GPUS
    await time.passes(7, registry, "next")
    assert registry.get("cut-off") is None
    assert not beat(registry, "cut-off")
    with pytest.raises(NotFound):
        await registry.lease_gpus("cut-off", GPUS, 2)
    with pytest.raises(Unavailable, match=r"cut-off \(gone; free in 53 s\) holds GPU-a"):
        await registry.lease_gpus("next", GPUS, 1)
    with pytest.raises(ResourceExhausted, match="needs 3 GPUs and sees 2"):
        await registry.lease_gpus("next", GPUS, 3)
    await time.passes(52, registry, "next")
    with pytest.raises(Unavailable):
        await registry.lease_gpus("next", GPUS, 1)
    await time.passes(1, registry, "next")
    assert await registry.lease_gpus("next", GPUS, 1) == GPUS[:1]


async def test_one_that_is_back_in_time_has_what_it_had(time: Time) -> None:
    registry = time.coordinator()
    await register(registry, "back")
    await registry.lease_gpus("back", GPUS, 2)
    await time.passes(50, registry)
    assert registry.get("back") is None
    await register(registry, "back")
    await time.passes(50, registry, "back")
    assert registry.gpus_of("back") == GPUS
    assert await registry.lease_gpus("back", GPUS, 2) == GPUS


async def test_a_coordinator_that_restarts_counts_anew(time: Time) -> None:
    registry = time.coordinator()
    for name in ("known", "gone"):
        await register(registry, name)
        await registry.lease_gpus(name, [GPUS[name == "gone"]], 1)
    await time.passes(50, registry, "known")  # which leaves ten seconds to the one that is gone
    time.now += 30
    registry = time.coordinator()
    await register(registry, "next")
    await time.passes(59, registry, "next")
    for uuid in GPUS:
        with pytest.raises(Unavailable, match="holds"):
            await registry.lease_gpus("next", [uuid], 1)
    await time.passes(1, registry, "next")
    assert await registry.lease_gpus("next", GPUS, 2) == GPUS


async def test_what_is_known_to_have_ended_holds_nothing(time: Time) -> None:
    registry = time.coordinator()
    await register(registry, "rollout-1", instance="rollout-1")
    await registry.lease_gpus("rollout-1", GPUS, 2)
    await register(registry, "rollout-1-r1", instance="rollout-1")
    assert await registry.lease_gpus("rollout-1-r1", GPUS, 2) == GPUS


async def test_a_coordinator_that_stood_still_blames_nobody(time: Time) -> None:
    registry = time.coordinator()
    await register(registry, "waiting")
    await time.passes(1, registry, "waiting")
    time.now += 100
    await registry.expire()
    assert registry.get("waiting") is not None


async def test_shares_of_a_gpu_outlive_the_coordinator_and_are_freed_one_by_one(time: Time) -> None:
    registry = time.coordinator()
    for name, role in (("engine", ROLLOUT), ("judge", JUDGE), ("other", JUDGE)):
        await register(registry, name, role=role)
    assert await registry.lease_gpus("engine", GPUS, 1, share=0.7) == GPUS[:1]
    assert await registry.lease_gpus("judge", GPUS[:1], 1, share=0.3) == GPUS[:1]
    time.now += 1
    registry = time.coordinator()
    assert (registry.gpus_of("engine"), registry.gpu_share_of("engine")) == (GPUS[:1], 0.7)
    assert (registry.gpus_of("judge"), registry.gpu_share_of("judge")) == (GPUS[:1], 0.3)
    assert (registry.gpus_of("other"), registry.gpu_share_of("other")) == ([], 1.0)
    with pytest.raises(ResourceExhausted, match=r"other needs 0.3 of 1 GPU .*, judge \(with a share of 0.3\) holds"):
        await registry.lease_gpus("other", GPUS[:1], 1, share=0.3)
    with pytest.raises(ResourceExhausted, match=r"judge .* holds"):
        await registry.lease_gpus("engine", GPUS[:1], 1, share=0.8)
    assert registry.gpu_share_of("engine") == 0.7  # what was refused changed nothing

    await time.passes(7, registry, "engine", "other")  # the judge isn't heard of any more
    with pytest.raises(Unavailable, match=r"judge \(gone; free in \d+ s\)"):
        await registry.lease_gpus("other", GPUS[:1], 1, share=0.3)
    with pytest.raises(ResourceExhausted, match=r"engine .* holds"):  # which waiting for the judge would not change
        await registry.lease_gpus("other", GPUS[:1], 1)
    await time.passes(53, registry, "engine", "other")
    assert await registry.lease_gpus("other", GPUS[:1], 1, share=0.3) == GPUS[:1]
    assert await registry.lease_gpus("engine", GPUS, 0) == []
    assert await registry.lease_gpus("other", GPUS[:1], 1) == GPUS[:1]  # the whole, now that it is alone
    assert time.coordinator().gpu_share_of("other") == 1.0
