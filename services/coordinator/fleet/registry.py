"""The registry of replicas, with leases that heartbeats renew, and the signal that wakes tasks after a change."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from google.protobuf import json_format

from relaxd.rpc.errors import NotFound, ResourceExhausted, Unavailable
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_READY,
    ReplicaStatus,
)
from relaxd.waiting import steady_time
from services.coordinator.fleet.gpu_allocation import (
    GpuHolders,
    choose,
    could_choose,
    seen_by,
    share_of,
    suffix_for,
    uuid_of,
)
from services.coordinator.state.records import Member, ReplicaRecord
from services.coordinator.state.store import AsyncStore, StoreUnavailable

GAP_SECONDS = 0.02
"""Minimum seconds between two wake-ups of a signal's waiters. Signals fired in between share the next wake-up."""


class Signal:
    """A broadcast without content that wakes all waiters, which then check their conditions.

    Lives in the event loop.
    """

    def __init__(self, gap: Callable[[], float] = lambda: GAP_SECONDS) -> None:
        """`gap` returns the minimum seconds between two wake-ups; values below GAP_SECONDS count as GAP_SECONDS."""
        self._gap = gap
        self._event = asyncio.Event()
        self._followers: WeakSet[SignalFollower] = WeakSet()
        self._woken_at = float("-inf")
        self._due: asyncio.TimerHandle | None = None

    def fire(self) -> None:
        """Wake all waiters, at once or when the gap since the last wake-up is over."""
        if self._due is not None:
            return
        pause = self._woken_at + max(GAP_SECONDS, self._gap()) - time.monotonic()
        if pause <= 0:
            self._wake()
        else:
            self._due = asyncio.get_running_loop().call_later(pause, self._wake)

    def _wake(self) -> None:
        self._due, self._woken_at = None, time.monotonic()
        for follower in self._followers:
            follower.wake()
        event, self._event = self._event, asyncio.Event()
        event.set()

    def follow(self) -> "SignalFollower":
        """Return a new follower of the signal.

        It is woken before the waiters, as long as the caller keeps a reference to it.
        """
        follower = SignalFollower()
        self._followers.add(follower)
        return follower

    async def wait(self, timeout_seconds: float) -> None:
        """Wait for the next `fire`, at most `timeout_seconds`."""
        await _wait(self._event, timeout_seconds)


class SignalFollower:
    """Waiter for one Signal that `wake` can also wake at once, without the signal's gap.

    A wake-up between two waits is not lost: it ends the next wait at once.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake the follower at once."""
        self._event.set()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until the signal has fired since the last wait, at most `timeout_seconds`."""
        await _wait(self._event, timeout_seconds)
        self._event.clear()


async def _wait(event: asyncio.Event, timeout_seconds: float) -> None:
    # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that arrives together with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            await event.wait()


logger = logging.getLogger(__name__)

Version = tuple[int, int]
"""Identifies weights across trainers: term of the trainer that made them, and weight version."""
GAP_SECONDS_PER_REPLICA = 4e-4
"""Seconds per replica of the fleet in the minimum time between two wake-ups of waiters.

Each waiter reads the whole fleet, so a fixed minimum would leave a large fleet's coordinator no time for anything else.
"""


@dataclass
class Replica:
    """A registered replica, whose lease is valid."""

    registration: Registration
    registered_at: float
    seen: float
    """Monotonic time of the replica's last heartbeat."""
    status: ReplicaStatus
    """Status from the replica's last heartbeat; empty before the first heartbeat."""
    draining: bool = False
    """True once a drain of the replica was requested."""
    drain_until: float | None = None
    """Unix time at which the drain must end; None: after the replica's grace period."""
    unheard: bool = False
    """True if the replica registered with an earlier coordinator and has sent no heartbeat since: its run and version
    are unknown."""
    synced: Version | None = None
    """Weight version that the last synchronisation brought to the replica; None once a heartbeat reports it."""
    synced_at: float = 0.0
    awake: bool | None = None
    """In a colocated run: True if the replica holds device memory; None before its first report."""
    awake_changed_at: float = 0.0
    """Monotonic time at which `awake` was last changed by a call rather than by a heartbeat."""
    gpu_requested_at: float = 0.0
    """Monotonic time of the replica's last GPU request that was denied; 0 if no request is waiting."""
    asleep: bool = False
    """True while the replica may not generate, after it was put to sleep in a colocated run."""
    member: Member = field(init=False)
    """The replica as a possible member of a weight group.

    Created once, because every change of the fleet compares all members.
    """

    def __post_init__(self) -> None:
        self.member = Member(
            replica_id=self.replica_id,
            registered_at=self.registered_at,
            address=self.registration.address,
            ranks=max(1, self.registration.engine_ranks),
        )

    @property
    def replica_id(self) -> str:
        """Unique id of the replica's process."""
        return self.registration.replica_id

    @property
    def launch_id(self) -> str:
        """Launch id of a replica that was added by scaling out; empty for others."""
        return self.registration.launch_id

    @property
    def instance(self) -> str:
        """Name that stays the same across restarts; the replica id if no supervisor restarts the replica."""
        return self.registration.instance or self.registration.replica_id

    @property
    def version(self) -> Version | None:
        """Weight version that the replica serves; None before the first synchronisation and while it can't generate."""
        if self.status.state != REPLICA_STATE_READY or self.asleep:
            return None
        weights = self.status.weights
        reported = (weights.term, weights.version) if weights.term else None
        if self.synced is not None:
            return max(reported, self.synced) if reported else self.synced
        return reported

    def set_awake(self, *, awake: bool) -> None:
        """Record whether the replica of a colocated run holds device memory."""
        self.awake, self.awake_changed_at = awake, time.monotonic()
        if not awake:
            self.synced = None

    def request_gpu(self) -> None:
        """Record that the replica holds no device memory and waits for the GPU."""
        self.set_awake(awake=False)
        self.gpu_requested_at = time.monotonic()

    def grant_gpu(self) -> None:
        """Record that the replica holds the GPU and no longer waits."""
        self.set_awake(awake=True)
        self.gpu_requested_at = 0.0

    def set_serving(self, *, serving: bool) -> None:
        """Record whether the replica may generate with the weights that it has."""
        self.asleep = not serving

    def end_turns(self) -> None:
        """Reset what only applies in a colocated run, because the replica's next run may not be colocated."""
        self.asleep, self.gpu_requested_at = False, 0.0


class Registry:
    """All replicas and their GPU leases. Lives in the event loop, with a copy in Redis.

    A replica without a heartbeat for lease_seconds is removed, and others get its work. It may be alive but cut off, so
    its GPUs are free only after gpu_lease_seconds without a heartbeat: by then it has ended its processes on them
    (relaxd.process.gpu_lease).
    """

    def __init__(
        self,
        store: AsyncStore,
        *,
        lease_seconds: float,
        heartbeat_seconds: float,
        gpu_lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._expired_at = clock()
        self._replicas: dict[str, Replica] = {}
        self._by_role: dict[str, dict[str, Replica]] = {}
        """The replicas of each role, by role and replica id, oldest first."""
        self._by_launch: dict[str, dict[str, Replica]] = {}
        """The replicas of each launch, by launch id and replica id, oldest first."""
        self._gpu_holders = GpuHolders({})
        self._gone: set[str] = set()
        """Ids of removed replicas that are still in Redis."""
        self._free_gpus_at: dict[str, float] = {}
        """Time at which the GPUs of each removed replica become free, by replica id, in seconds of the clock."""
        self._writing = asyncio.Lock()
        """Lock held while writing to Redis, so that changes arrive there in order."""
        self.lease_seconds = lease_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self.gpu_lease_seconds = max(gpu_lease_seconds, lease_seconds)
        self.changed = Signal(lambda: GAP_SECONDS_PER_REPLICA * len(self._replicas))

    @property
    def term(self) -> int:
        """The coordinator's fencing term."""
        return self._store.term

    def load(self, records: dict[str, ReplicaRecord], gpu_holders: dict[str, str]) -> None:
        """Load the replicas that an earlier coordinator saved. All leases, including GPU leases, start now.

        The earlier coordinator may have received heartbeats until just now.
        """
        self._gpu_holders = GpuHolders(gpu_holders)
        gone = set(gpu_holders.values()) - set(records)
        self._free_gpus_at = dict.fromkeys(gone, self._clock() + self.gpu_lease_seconds)
        for record in sorted(records.values(), key=lambda record: record.registered_at):
            registration = json_format.Parse(record.registration_json, Registration())
            self._add(registration, record.registered_at, unheard=True)
            self._replicas[registration.replica_id].draining = record.draining
            self._replicas[registration.replica_id].drain_until = record.drain_until

    async def register(self, registration: Registration) -> None:
        """Add a replica to the registry. Earlier replicas with its id or instance are removed."""
        now = steady_time()
        record = ReplicaRecord(registration_json=json_format.MessageToJson(registration), registered_at=now)
        async with self._writing:
            await self._store.save_replica(registration.replica_id, record)
            self._gone.discard(registration.replica_id)
            self._free_gpus_at.pop(registration.replica_id, None)
            self._add(registration, now)
        logger.info("%s registered from %s", registration.replica_id, registration.address)
        self.changed.fire()
        replaced = self.replaced_by(registration)
        await self.remove([replica for replica in replaced if replica.replica_id != registration.replica_id])

    def replaced_by(self, registration: Registration) -> list[Replica]:
        """Return the replicas that a registration replaces: those with the same replica id or the same instance.

        An instance has one process at a time: when a new one registers, the earlier one has ended.
        """
        replica_id, instance = registration.replica_id, registration.instance
        return [
            replica
            for replica in self._replicas.values()
            if replica.replica_id == replica_id or (instance and replica.instance == instance)
        ]

    def heartbeat(self, replica_id: str, status: ReplicaStatus) -> Replica | None:
        """Store a heartbeat's status and renew the replica's lease.

        Returns the replica; None if it isn't registered.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        replica.seen = self._clock()
        before = _shown(replica)
        # A status from before the end of a synchronisation may arrive after it.
        if replica.synced is not None and replica.seen - replica.synced_at > 2 * self.heartbeat_seconds:
            replica.synced = None
        if replica.awake is None or replica.seen - replica.awake_changed_at > 2 * self.heartbeat_seconds:
            replica.awake = status.awake
        replica.status, replica.unheard = status, False
        if before != _shown(replica):
            self.changed.fire()
        return replica

    def mark_synced(self, member: Member, version: Version) -> None:
        """Record that a synchronisation has brought a weight version to an engine."""
        replica = self._replicas.get(member.replica_id)
        if replica is not None and replica.registered_at == member.registered_at:
            replica.synced, replica.synced_at = version, self._clock()
            replica.status.state = REPLICA_STATE_READY
            self.changed.fire()

    async def drain(self, replica: Replica, until: float | None = None) -> None:
        """Mark a replica as draining. `until` is the Unix time at which the drain must end, if given.

        Answers to its heartbeats tell it to drain.
        """
        replica.draining, replica.drain_until = True, until
        await self._save(replica)

    async def undrain(self, replica: Replica) -> None:
        """Cancel a drain: the answer to the next heartbeat tells the replica to work again."""
        replica.draining, replica.drain_until = False, None
        await self._save(replica)

    async def remove(self, replicas: Iterable[Replica]) -> None:
        """Remove replicas whose processes have ended, and free their GPUs at once."""
        there = [replica for replica in replicas if self._replicas.get(replica.replica_id) is replica]
        if not there:
            return
        for replica in there:
            self._discard(replica)
            logger.info("%s is gone", replica.replica_id)
        gone = [replica.replica_id for replica in there]
        self._gone.update(gone)
        self._free_gpus_at |= dict.fromkeys(gone, self._clock())
        self.changed.fire()
        await self._flush_removals()

    async def lease_gpus(
        self, replica_id: str, candidates: Sequence[str], count: int, *, shared: bool = False, share: float = 1.0
    ) -> list[str]:
        """Lease `count` of the candidate GPUs to a replica instead of its earlier GPUs, and return their UUIDs.

        With `shared` (a colocated run) the trainer and one engine may hold the same GPU. With a `share` below 1,
        replicas of other roles may hold the rest of each GPU. Raises NotFound: the replica isn't registered;
        ResourceExhausted: others hold too many candidates; Unavailable: the leases of lost replicas on candidates have
        not ended.
        """
        async with self._writing:
            if replica_id not in self._replicas:
                raise NotFound(f"no replica {replica_id!r} is registered: register first")
            role = self._replicas[replica_id].registration.role
            records = self._gpu_holders.among(candidates)
            named = {record: self._name(holder) for record, holder in records.items()}
            holders, preferred = seen_by(replica_id, role, named, shared=shared, share=share)
            try:
                granted = choose(replica_id, candidates, count, holders, preferred, share)
            except ResourceExhausted as error:
                alive = {record: holder for record, holder in records.items() if holder not in self._free_gpus_at}
                holders, _ = seen_by(replica_id, role, alive, shared=shared, share=share)
                if could_choose(replica_id, candidates, count, holders):
                    raise Unavailable(str(error)) from error
                raise
            chosen = [uuid + suffix_for(role, shared=shared, share=share) for uuid in granted]
            before = self._gpu_holders.of(replica_id)
            freed = self._gpu_holders.hold(replica_id, chosen)
            # Written even without a change: an earlier call may have been cancelled before its write.
            if chosen or freed:
                await self._store.save_gpus(replica_id, chosen, freed)
            if set(chosen) != set(before):
                logger.info("%s holds GPUs: %s", replica_id, ", ".join(granted) or "none")
        return granted

    def gpus_of(self, replica_id: str) -> list[str]:
        """Return the UUIDs of the GPUs that a replica holds, whole or in part."""
        return [uuid_of(record) for record in self._gpu_holders.of(replica_id)]

    def gpu_share_of(self, replica_id: str) -> float:
        """Return a replica's share of each of its GPUs; 1 if it holds whole GPUs or none."""
        return min(map(share_of, self._gpu_holders.of(replica_id)), default=1.0)

    def get(self, replica_id: str) -> Replica | None:
        """Return the replica with this id; None if it isn't registered."""
        return self._replicas.get(replica_id)

    def holds(self, member: Member) -> bool:
        """Return True if a member's registration, not only its replica id, is still the current one."""
        replica = self._replicas.get(member.replica_id)
        return replica is not None and replica.registered_at == member.registered_at

    def of_launch(self, launch_id: str) -> list[Replica]:
        """Return the replicas with this launch id, oldest first.

        There are several while a dead process's lease has not expired.
        """
        return list(self._by_launch.get(launch_id, {}).values())

    def of_role(self, role: str, run_id: str | None = None) -> list[Replica]:
        """Return the replicas of a role, oldest first. With `run_id`, return only those that work on that run."""
        found = self._by_role.get(role, {}).values()
        return [replica for replica in found if run_id is None or replica.status.run_id == run_id]

    def all(self) -> list[Replica]:
        """Return all replicas, sorted by role and id."""
        return sorted(self._replicas.values(), key=lambda r: (r.registration.role, r.replica_id))

    async def expire_forever(self) -> None:
        """Call `expire` four times per heartbeat interval, forever."""
        while True:
            await asyncio.sleep(self.heartbeat_seconds / 4)  # idle: looks again
            await self.expire()

    async def expire(self) -> None:
        """Remove replicas whose lease has expired, and free GPUs whose lease has expired."""
        now, last = self._clock(), self._expired_at
        self._expired_at = now
        if now - last > self.lease_seconds / 2:  # this process was suspended and received no heartbeats
            for replica in self._replicas.values():
                replica.seen = now
        for replica in list(self._replicas.values()):
            if now - replica.seen > self.lease_seconds:
                self._discard(replica)
                self._gone.add(replica.replica_id)
                self._free_gpus_at[replica.replica_id] = replica.seen + self.gpu_lease_seconds
                logger.warning("%s is gone: no heartbeat for %.1f s", replica.replica_id, self.lease_seconds)
                self.changed.fire()
        await self._flush_removals()

    async def _flush_removals(self) -> None:
        """Delete removed replicas from Redis, and free the GPUs whose lease has expired."""
        async with self._writing:
            now = self._clock()
            gone = list(self._gone)
            free = [replica_id for replica_id, at in self._free_gpus_at.items() if at <= now]
            if not gone and not free:
                return
            gpus = [record for replica_id in free for record in self._gpu_holders.of(replica_id)]
            try:
                await self._store.remove_replicas(gone, gpus)
            except StoreUnavailable:  # logged by the run's loops; retried at the next call
                return
            self._gone.difference_update(gone)
            for replica_id in free:
                del self._free_gpus_at[replica_id]
                for record in self._gpu_holders.of(replica_id):
                    logger.info("GPU %s is free: %s is gone", uuid_of(record), replica_id)
            self._gpu_holders.free(gpus)

    def _name(self, replica_id: str) -> str:
        """Return the name of a GPU's holder for error messages; of a lost replica also the seconds until its GPUs are
        free."""
        at = self._free_gpus_at.get(replica_id)
        return replica_id if at is None else f"{replica_id} (gone; free in {max(0.0, at - self._clock()):.0f} s)"

    async def _save(self, replica: Replica) -> None:
        record = ReplicaRecord(
            registration_json=json_format.MessageToJson(replica.registration),
            registered_at=replica.registered_at,
            draining=replica.draining,
            drain_until=replica.drain_until,
        )
        async with self._writing:
            if self._replicas.get(replica.replica_id) is replica:
                await self._store.save_replica(replica.replica_id, record)
        self.changed.fire()

    def _add(self, registration: Registration, registered_at: float, *, unheard: bool = False) -> None:
        if (earlier := self._replicas.get(registration.replica_id)) is not None:
            self._discard(earlier)
        replica = Replica(registration, registered_at, seen=self._clock(), status=ReplicaStatus(), unheard=unheard)
        for replicas in self._lists(replica):
            replicas[replica.replica_id] = replica

    def _discard(self, replica: Replica) -> None:
        for replicas in self._lists(replica):
            del replicas[replica.replica_id]
        if not self._by_launch.get(replica.launch_id, True):
            del self._by_launch[replica.launch_id]

    def _lists(self, replica: Replica) -> list[dict[str, Replica]]:
        """Return the registry's dictionaries to which a registered replica belongs."""
        lists = [self._replicas, self._by_role.setdefault(replica.registration.role, {})]
        if replica.launch_id:
            lists.append(self._by_launch.setdefault(replica.launch_id, {}))
        return lists


def _shown(replica: Replica) -> tuple[int, str, Version | None, bool]:
    """Return the parts of a replica's state whose changes wake waiters: state, run, version and `unheard`."""
    return replica.status.state, replica.status.run_id, replica.version, replica.unheard
