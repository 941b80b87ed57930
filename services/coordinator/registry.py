"""Who is there: replicas by id, with leases that heartbeats renew."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from relaxd.rpc.errors import NotFound, ResourceExhausted, Unavailable
from relaxd.v1.coordinator_pb2 import RegisterRequest
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_READY,
    ROLE_ROLLOUT,
    GetStatusResponse,
    Role,
)
from services.coordinator.changes import Signal
from services.coordinator.gpus import SHARED, choose, could_choose, seen_by
from services.coordinator.records import Member, ReplicaRecord
from services.coordinator.store import Store, StoreUnavailable

logger = logging.getLogger(__name__)

Version = tuple[int, int]
"""(epoch, version)."""


@dataclass
class Replica:
    """One replica whose lease holds."""

    registration: RegisterRequest
    registered_at: float
    seen: float
    """Time of the last heartbeat, by the monotonic clock."""
    status: GetStatusResponse
    """Its last word; empty until the first heartbeat."""
    draining: bool = False
    """Asked to drain."""
    drain_until: float | None = None
    """Unix time until which it may drain; None: as long as its own grace period lasts."""
    unheard: bool = False
    """Taken over from an earlier coordinator, and not heard of since: what it works on and serves isn't known."""
    synced: Version | None = None
    """The version that the last synchronisation left on it, until a heartbeat says so itself."""
    synced_at: float = 0.0
    awake: bool | None = None
    """In a colocated run: whether it has the device's memory; None before it said so."""
    turned_at: float = 0.0
    """When that was last changed by a call, by the monotonic clock."""
    asked_at: float = 0.0
    """When it last asked for its turn in vain, by the monotonic clock; long ago: it does not wait for it."""
    serves_nothing: bool = False
    """It was put to sleep, and has not been woken up since."""

    @property
    def replica_id(self) -> str:
        """Its unique name."""
        return self.registration.replica_id

    @property
    def launch_id(self) -> str:
        """The name under which it was scaled out; empty for one that was there from the start."""
        return self.registration.launch_id

    @property
    def instance(self) -> str:
        """The name of its place, over all its processes: its id, where nobody would start it again."""
        return self.registration.instance or self.registration.replica_id

    @property
    def member(self) -> Member:
        """It as a member of a weight group."""
        return Member(
            replica_id=self.replica_id,
            registered_at=self.registered_at,
            address=self.registration.address,
            ranks=max(1, self.registration.engine_ranks),
        )

    @property
    def version(self) -> Version | None:
        """What it serves; None before its first synchronisation, and while it can't serve."""
        if self.status.state != REPLICA_STATE_READY or self.serves_nothing:
            return None
        weights = self.status.weights
        told = (weights.epoch, weights.version) if weights.epoch else None
        if self.synced is not None:
            return max(told, self.synced) if told else self.synced
        return told

    def turn(self, *, awake: bool) -> None:
        """A call to it, or from it, has said whether it has the device's memory."""
        self.awake, self.turned_at = awake, time.monotonic()
        if not awake:
            self.synced = None


class Registry:
    """All replicas and the GPUs that they lease. Lives in the event loop; all of it is also kept in Redis.

    A replica without a heartbeat for lease_seconds is gone: its work goes to others. It may only be cut off, with its
    processes on its GPUs, so those go to others after gpu_lease_seconds without a heartbeat: by then it has ended what
    uses them, by itself (relaxd.rpc.gpu_lease).
    """

    def __init__(
        self,
        store: Store,
        *,
        lease_seconds: float,
        heartbeat_seconds: float,
        gpu_lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._looked = clock()
        self._replicas: dict[str, Replica] = {}
        self._gpu_holders: dict[str, str] = {}
        """Replica ids by GPU UUID."""
        self._gone: set[str] = set()
        """Replicas that are gone and that Redis has not forgotten yet."""
        self._free_gpus_at: dict[str, float] = {}
        """When the GPUs of replicas that are gone are free, by replica id."""
        self._writing = asyncio.Lock()
        """Held while Redis is written to: it hears of changes in the order in which they happen."""
        self.lease_seconds = lease_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self.gpu_lease_seconds = max(gpu_lease_seconds, lease_seconds)
        self.changed = Signal()

    def load(self, records: dict[str, ReplicaRecord], gpu_holders: dict[str, str]) -> None:
        """Take over what an earlier coordinator knew; each replica has a whole lease to show itself.

        It may have been heard until just now, so its lease on GPUs, too, begins anew.
        """
        self._gpu_holders = dict(gpu_holders)
        gone = set(gpu_holders.values()) - set(records)
        self._free_gpus_at = dict.fromkeys(gone, self._clock() + self.gpu_lease_seconds)
        for record in records.values():
            registration = json_format.Parse(record.registration_json, RegisterRequest())
            self._add(registration, record.registered_at, unheard=True)
            self._replicas[registration.replica_id].draining = record.draining
            self._replicas[registration.replica_id].drain_until = record.drain_until

    async def register(self, registration: RegisterRequest) -> None:
        """Make a replica known, in the place of an earlier one of the same id."""
        now = time.time()
        record = ReplicaRecord(registration_json=json_format.MessageToJson(registration), registered_at=now)
        async with self._writing:
            await asyncio.to_thread(self._store.save_replica, registration.replica_id, record)
            self._gone.discard(registration.replica_id)
            self._free_gpus_at.pop(registration.replica_id, None)
            self._add(registration, now)
        logger.info("%s registered from %s", registration.replica_id, registration.address)
        self.changed.fire()
        if registration.instance:  # of which there is one process at a time: what was there before is gone
            others = (r for r in self._replicas.values() if r.instance == registration.instance)
            await self.remove([r for r in others if r.replica_id != registration.replica_id])

    def heartbeat(self, replica_id: str, status: GetStatusResponse) -> Replica | None:
        """Renew a lease; None if the replica isn't known."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        replica.seen = self._clock()
        # A status that was written before the end of a synchronisation may arrive after it.
        if replica.synced is not None and replica.seen - replica.synced_at > 2 * self.heartbeat_seconds:
            replica.synced = None
        if replica.awake is None or replica.seen - replica.turned_at > 2 * self.heartbeat_seconds:
            replica.awake = status.awake
        before = (replica.status.state, replica.status.run_id, replica.status.weights)
        replica.status, replica.unheard = status, False
        if before != (status.state, status.run_id, status.weights):
            self.changed.fire()
        return replica

    def mark_synced(self, member: Member, version: Version) -> None:
        """A synchronisation has left a version on an engine."""
        replica = self._replicas.get(member.replica_id)
        if replica is not None and replica.registered_at == member.registered_at:
            replica.synced, replica.synced_at = version, self._clock()
            replica.status.state = REPLICA_STATE_READY
            self.changed.fire()

    async def drain(self, replica: Replica, until: float | None = None) -> None:
        """Remember that a replica was asked to drain, until a Unix time if any; its heartbeats tell it again."""
        replica.draining, replica.drain_until = True, until
        await self._save(replica)

    async def undrain(self, replica: Replica) -> None:
        """Take back a drain: with its next heartbeat the replica hears that it has to work again."""
        replica.draining, replica.drain_until = False, None
        await self._save(replica)

    async def remove(self, replicas: Iterable[Replica]) -> None:
        """Forget replicas whose processes are known to be gone, and free what they held, before their leases end."""
        gone = [r.replica_id for r in replicas if self._replicas.get(r.replica_id) is r]
        if not gone:
            return
        for replica_id in gone:
            del self._replicas[replica_id]
            logger.info("%s is gone", replica_id)
        self._gone.update(gone)
        self._free_gpus_at |= dict.fromkeys(gone, self._clock())
        self.changed.fire()
        await self._forget_gone()

    async def lease_gpus(
        self, replica_id: str, candidates: Sequence[str], count: int, *, shared: bool = False
    ) -> list[str]:
        """Let a replica hold `count` of the candidates and nothing else; returns their UUIDs.

        With `shared`, of a colocated run, the trainer and one engine hold a GPU together, and nobody else.
        Raises NotFound: it isn't registered; ResourceExhausted: others hold too many of them; Unavailable: others who
        are gone hold them for a while.
        """
        async with self._writing:
            if replica_id not in self._replicas:
                raise NotFound(f"no replica {replica_id!r} is registered: register first")
            role = self._replicas[replica_id].registration.role
            named = {uuid: self._name(holder) for uuid, holder in self._gpu_holders.items()}
            holders, rather = seen_by(role, named, shared=shared)
            try:
                granted = choose(replica_id, candidates, count, holders, rather)
            except ResourceExhausted as error:
                gone = {self._name(holder) for holder in self._free_gpus_at}
                if could_choose(replica_id, candidates, count, holders, gone):
                    raise Unavailable(str(error)) from error
                raise
            suffix = SHARED if shared and role == ROLE_ROLLOUT else ""
            chosen = [uuid + suffix for uuid in granted]
            before = [uuid for uuid, holder in self._gpu_holders.items() if holder == replica_id]
            freed = [uuid for uuid in before if uuid not in chosen]
            for uuid in freed:
                del self._gpu_holders[uuid]
            self._gpu_holders |= dict.fromkeys(chosen, replica_id)
            # Written even where nothing changes: an earlier call may have ended before its write did.
            if chosen or freed:
                await asyncio.to_thread(self._store.save_gpus, replica_id, chosen, freed)
            if set(chosen) != set(before):
                logger.info("%s holds GPUs: %s", replica_id, ", ".join(granted) or "none")
        return granted

    def gpus_of(self, replica_id: str) -> list[str]:
        """UUIDs of the GPUs that a replica holds."""
        return [uuid.removesuffix(SHARED) for uuid, holder in self._gpu_holders.items() if holder == replica_id]

    def get(self, replica_id: str) -> Replica | None:
        """A replica by id."""
        return self._replicas.get(replica_id)

    def holds(self, member: Member) -> bool:
        """Whether this very registration is still there."""
        replica = self._replicas.get(member.replica_id)
        return replica is not None and replica.registered_at == member.registered_at

    def of_launch(self, launch_id: str) -> list[Replica]:
        """The replicas of one launch id, oldest first: more than one while the lease of a process that died holds."""
        found = (r for r in self._replicas.values() if r.launch_id == launch_id)
        return sorted(found, key=lambda replica: replica.registered_at)

    def of_role(self, role: "Role.ValueType", run_id: str | None = None) -> list[Replica]:
        """The replicas of a role, oldest first; with `run_id` only those that work on that run."""
        found: Iterable[Replica] = (r for r in self._replicas.values() if r.registration.role == role)
        if run_id is not None:
            found = (r for r in found if r.status.run_id == run_id)
        return sorted(found, key=lambda replica: replica.registered_at)

    def all(self) -> list[Replica]:
        """Every replica, by role and id."""
        return sorted(self._replicas.values(), key=lambda r: (r.registration.role, r.replica_id))

    async def expire_forever(self) -> None:
        """Remove replicas whose lease is over, and free the GPUs of those that have been gone for long enough."""
        while True:
            await asyncio.sleep(self.heartbeat_seconds / 4)
            await self.expire()

    async def expire(self) -> None:
        """Look once whose lease is over."""
        now, last = self._clock(), self._looked
        self._looked = now
        if now - last > self.lease_seconds / 2:  # we were frozen ourselves, so nobody could renew
            for replica in self._replicas.values():
                replica.seen = now
        for replica in list(self._replicas.values()):
            if now - replica.seen > self.lease_seconds:
                del self._replicas[replica.replica_id]
                self._gone.add(replica.replica_id)
                self._free_gpus_at[replica.replica_id] = replica.seen + self.gpu_lease_seconds
                logger.warning("%s is gone: no heartbeat for %.1f s", replica.replica_id, self.lease_seconds)
                self.changed.fire()
        await self._forget_gone()

    async def _forget_gone(self) -> None:
        """Let Redis forget who is gone, and free the GPUs of whom can't be using them any more."""
        async with self._writing:
            now = self._clock()
            gone = list(self._gone)
            free = [replica_id for replica_id, at in self._free_gpus_at.items() if at <= now]
            if not gone and not free:
                return
            gpus = [uuid for uuid, holder in self._gpu_holders.items() if holder in free]
            try:
                await asyncio.to_thread(self._store.remove_replicas, gone, gpus)
            except StoreUnavailable:  # the run's own loops tell about it
                return
            self._gone.difference_update(gone)
            for replica_id in free:
                del self._free_gpus_at[replica_id]
            for uuid in gpus:
                logger.info("%s is free: %s is gone", uuid.removesuffix(SHARED), self._gpu_holders.pop(uuid))

    def _name(self, replica_id: str) -> str:
        """A holder of GPUs as others are told of it."""
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
                await asyncio.to_thread(self._store.save_replica, replica.replica_id, record)
        self.changed.fire()

    def _add(self, registration: RegisterRequest, registered_at: float, *, unheard: bool = False) -> None:
        self._replicas[registration.replica_id] = Replica(
            registration, registered_at, seen=self._clock(), status=GetStatusResponse(), unheard=unheard
        )
