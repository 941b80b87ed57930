"""What must not grow with the fleet: wake-ups by many changes, threads of readers, the search for who holds a GPU."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from relaxd.roles import ROLLOUT
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ReplicaStatus, WeightVersion
from services.coordinator.fleet.gpu_allocation import OWN, SHARED, GpuHolders, uuid_of
from services.coordinator.fleet.registry import GAP_SECONDS, Registry, Signal, SignalFollower
from services.coordinator.state.store import READERS, AsyncStore, Store, read_in_thread


async def test_many_changes_wake_their_waiters_a_few_times_and_none_is_missed() -> None:
    signal = Signal()
    woken: list[float] = []

    async def look() -> None:
        while True:
            await signal.wait(10.0)
            woken.append(time.monotonic())

    waiter = asyncio.create_task(look())
    await asyncio.sleep(0)
    begun = time.monotonic()
    for _ in range(500):
        signal.fire()
        await asyncio.sleep(0)
    last = time.monotonic()
    while not woken or woken[-1] < last:
        await asyncio.sleep(0)
        assert time.monotonic() < last + 5.0, "the last change was missed"
    assert woken[0] - begun < 10 * GAP_SECONDS  # a change that comes alone is told at once
    assert len(woken) <= (woken[-1] - begun) / GAP_SECONDS + 2
    waiter.cancel()


async def test_wake_ups_are_as_far_apart_as_is_asked() -> None:
    signal = Signal(lambda: 10 * GAP_SECONDS)
    signal.fire()
    signal.fire()
    begun = time.monotonic()
    await signal.wait(10.0)
    assert time.monotonic() - begun > 8 * GAP_SECONDS


async def test_a_follower_is_woken_first_and_by_some_without_a_gap() -> None:
    signal, order = Signal(lambda: 60.0), list[str]()
    follower = signal.follow()

    async def wait(who: str, waiter: Signal | SignalFollower) -> None:
        await waiter.wait(600.0)
        order.append(who)

    waiters = [asyncio.create_task(wait(*each)) for each in (("other", signal), ("follower", follower))]
    await asyncio.sleep(0)
    signal.fire()
    async with asyncio.timeout(10):
        await asyncio.gather(*waiters)
    assert order == ["follower", "other"]
    signal.fire()  # tells in a minute
    begun = time.monotonic()
    await follower.wait(0.05)
    assert time.monotonic() - begun >= 0.05
    follower.wake()  # before the wait, which does not miss it
    async with asyncio.timeout(10):
        await follower.wait(600.0)


async def test_heartbeats_that_confirm_a_synchronisation_wake_nobody(redis_url: str) -> None:
    store = AsyncStore(Store(redis_url))
    await store.take_over()
    registry = Registry(store, lease_seconds=6.0, heartbeat_seconds=1.0, gpu_lease_seconds=60.0)
    names = [f"rollout-{number}" for number in range(32)]
    for name in names:
        await registry.register(Registration(replica_id=name, role=ROLLOUT, address="127.0.0.1:9"))

    def beat(version: int) -> None:
        weights = WeightVersion(term=1, version=version)
        for name in names:
            status = ReplicaStatus(state=REPLICA_STATE_READY, run_id="run", weights=weights)
            assert registry.heartbeat(name, status) is not None

    beat(1)
    for replica in registry.of_role(ROLLOUT):
        assert registry.holds(replica.member)
        registry.mark_synced(replica.member, (1, 2))
    fired = []
    registry.changed.fire = lambda: fired.append(1)  # type: ignore[method-assign]
    beat(2)
    assert not fired
    beat(3)
    assert len(fired) == len(names)


async def test_readers_of_a_redis_that_does_not_answer_take_no_thread_from_others() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    answers = threading.Event()
    readers = [asyncio.create_task(read_in_thread(answers.wait, 30.0)) for _ in range(4 * READERS._max_workers)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5.0):
        assert await asyncio.to_thread(lambda: "registered") == "registered"
    assert not any(reader.done() for reader in readers)
    answers.set()
    assert all(await asyncio.gather(*readers))


def test_holders_of_gpus_are_those_of_a_plain_table() -> None:
    chance = random.Random(1)
    uuids = [f"GPU-{number}" for number in range(20)]
    suffixes = ("", OWN, SHARED, "@judge:0.3", "@rollout:0.7")
    table = {uuids[0]: "replica-0", uuids[1] + SHARED: "replica-1", uuids[2] + OWN: "replica-1"}
    holders = GpuHolders(table)
    for _ in range(400):
        replica_id = f"replica-{chance.randrange(6)}"
        mine = [record for record, holder in table.items() if holder == replica_id]
        free = [uuid + suffix for uuid in uuids for suffix in suffixes if uuid + suffix not in table]
        if chance.random() < 0.7:
            wanted = chance.sample(mine, min(1, len(mine))) + chance.sample(free, min(3, len(free)))
            assert sorted(holders.hold(replica_id, wanted)) == sorted(set(mine) - set(wanted))
            table = {record: holder for record, holder in table.items() if holder != replica_id}
            table |= dict.fromkeys(wanted, replica_id)
        else:
            holders.free(mine)
            table = {record: holder for record, holder in table.items() if holder != replica_id}
        for number in range(6):
            held = {record for record, holder in table.items() if holder == f"replica-{number}"}
            assert set(holders.of(f"replica-{number}")) == held
        asked = chance.sample(uuids, 5)
        assert holders.among(asked) == {r: holder for r, holder in table.items() if uuid_of(r) in asked}
