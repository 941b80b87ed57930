"""The replicas of another role that work on a run, as listed by the coordinator, for services that call them."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import grpc

from relaxd.rpc.client import channel
from relaxd.rpc.errors import explain
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1.coordinator_pb2 import CallableReplica, WatchReplicasRequest, WatchReplicasResponse
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_IDLE,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    REPLICA_STATE_UNSPECIFIED,
)
from relaxd.waiting import Backoff

AVOIDED_SECONDS = 5.0
"""Seconds for which a replica that did not answer isn't called. After them the coordinator knows if the replica has
ended."""
FIRST_SECONDS = 5.0
"""Maximum seconds to wait for the coordinator's first list of replicas."""
WATCH_SECONDS = 60.0
WATCH_GRACE_SECONDS = 15.0
"""Seconds by which the deadline of a WatchReplicas call exceeds WATCH_SECONDS."""
CLOSE_SECONDS = 5.0
PAUSE = Backoff(first_seconds=0.2, max_seconds=5.0)
"""Pauses between two WatchReplicas calls while the coordinator is away."""

_TO_COME = (REPLICA_STATE_UNSPECIFIED, REPLICA_STATE_IDLE, REPLICA_STATE_STARTING)
Stub = TypeVar("Stub")
_log = logging.getLogger(__name__)


class NoReplicaError(Exception):
    """No replica of the role can be called at the moment."""

    def __init__(self, message: str, *, starting: bool = False) -> None:
        """Create the error. `starting`: True if the replicas haven't failed, but are still to start."""
        super().__init__(message)
        self.starting = starting


class Peer(Generic[Stub]):
    """A replica of another role that this process can call."""

    def __init__(self, replica_id: str, address: str, to: grpc.aio.Channel, stub: Stub) -> None:
        self.replica_id = replica_id
        self.address = address
        self.channel = to
        self.stub = stub
        self.open = 0
        """Number of this process's calls to the replica that aren't answered yet."""
        self.avoided_until = 0.0
        self.avoided_why = ""
        """Reason why the replica isn't called until `avoided_until`, such as "did not answer a moment ago"."""
        self.ready = True
        """True if the coordinator's last list says that the replica is ready."""
        self.version: int | None = None
        """Version of the weights on the replica, as the coordinator or the replica last reported it; None without
        weights."""
        self.term = 0
        """Term of the trainer that sent the weights on the replica."""

    @contextmanager
    def called(self) -> Iterator[Stub]:
        """Yield the replica's stub for a call, which counts as open until the block ends."""
        self.open += 1
        try:
            yield self.stub
        finally:
            self.open -= 1


class PeerReplicas(Generic[Stub]):
    """Follows the replicas of a role, and chooses the ready replica with the fewest open calls. For one event loop."""

    def __init__(
        self,
        role: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        coordinator: CoordinatorStub,
        settings: ServiceSettings,
        run_id: str,
        *,
        serving: bool = False,
    ) -> None:
        """Start to follow the replicas of a role.

        Args:
            role: role of the replicas.
            stub: makes a stub from a replica's channel.
            coordinator: the coordinator.
            settings: of this process.
            run_id: the run.
            serving: whether only replicas that serve weights can be called.
        """
        self.role = role
        self._stub = stub
        self._coordinator = coordinator
        self._settings = settings
        self._run_id = run_id
        self._serving = serving
        self._known: dict[str, CallableReplica] = {}
        """All replicas of the role that the coordinator lists, by replica id."""
        self._peers: dict[str, Peer[Stub]] = {}
        """Replicas of the role that are ready or still have an open call, by replica id."""
        self._came = False
        """True once any replica of the role has been ready."""
        self._listed = asyncio.Event()
        """Event that is set once the coordinator has listed the role's replicas."""
        self._watching = asyncio.create_task(self._watch(), name=f"watch the {role} replicas")

    @property
    def ready(self) -> list[Peer[Stub]]:
        """Replicas of the role that are ready."""
        return [peer for peer in self._peers.values() if peer.ready]

    def unready(self) -> list[str]:
        """Return the ids of the role's replicas that aren't ready, each with the reason."""
        return [f"{one.replica_id} {one.detail}".rstrip() for one in self._known.values() if not self._is_able(one)]

    async def choose(self, preferred: str = "", fits: Callable[[Peer[Stub]], bool] | None = None) -> Peer[Stub]:
        """Return the replica to call: the preferred one if it can be called, else one with the fewest open calls.

        `fits` restricts the choice to replicas for which it returns True. Raises NoReplicaError.
        """
        await self._wait_listed()
        now = time.monotonic()
        able = [peer for peer in self.ready if peer.avoided_until <= now]
        if not able:
            raise self._no_replica()
        if fits is not None and not (able := list(filter(fits, able))):
            raise NoReplicaError(f"no ready {self.role} replica serves the version")
        if (peer := self._peers.get(preferred)) in able:
            return peer
        fewest = min(peer.open for peer in able)
        return random.choice([peer for peer in able if peer.open == fewest])

    def avoid(
        self, peer: Peer[Stub], seconds: float = AVOIDED_SECONDS, why: str = "did not answer a moment ago"
    ) -> None:
        """Exclude a replica from calls for `seconds`. Error messages show the reason `why` after the words "those
        that"."""
        peer.avoided_until, peer.avoided_why = time.monotonic() + seconds, why

    async def close(self) -> None:
        """Stop following the replicas, and close the connections to them."""
        self._watching.cancel()
        await asyncio.wait({self._watching}, timeout=CLOSE_SECONDS)
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            await peer.channel.close(None)

    async def _wait_listed(self) -> None:
        """Wait until the coordinator has listed the role's replicas. Raises NoReplicaError."""
        if self._watching.done() and (error := self._watching.exception()) is not None:
            raise error
        if self._listed.is_set():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self._listed.wait()
                return
        raise NoReplicaError(f"the coordinator has not named the {self.role} replicas within {FIRST_SECONDS:g} s")

    async def _watch(self) -> None:
        """Follow the coordinator's list of the role's replicas for ever. The last list stays while the coordinator is
        away."""
        after, failures = 0, 0
        while True:
            request = WatchReplicasRequest(role=self.role, after=after, max_seconds=WATCH_SECONDS)
            try:
                timeout = WATCH_SECONDS + WATCH_GRACE_SECONDS
                async for news in self._coordinator.WatchReplicas(request, timeout=timeout):
                    if failures:
                        _log.info("the coordinator is back, and names the %s replicas", self.role)
                    await self._take_in(news)
                    after, failures = news.change, 0
            except grpc.aio.AioRpcError as error:
                failures += 1
                if failures == 1:
                    _log.warning(
                        "calling the same %s replicas, because the coordinator is away: %s", self.role, explain(error)
                    )
                await asyncio.sleep(PAUSE.spread_pause(failures))  # named: by the warning

    async def _take_in(self, news: WatchReplicasResponse) -> None:
        """Apply changes in the coordinator's list of the role's replicas."""
        gone = self._known.keys() - {one.replica_id for one in news.replicas} if news.complete else news.gone
        for name in list(gone):
            self._known.pop(name, None)
            if name in self._peers:
                self._peers[name].ready = False
        for replica in news.replicas:
            name = replica.replica_id
            if name in self._known and replica.state == REPLICA_STATE_UNSPECIFIED:
                continue  # the coordinator has just started, and has not heard of it yet
            self._known[name] = replica
            able = self._is_able(replica)
            self._came |= able
            if able and (name not in self._peers or self._peers[name].address != replica.address):
                if (gone_peer := self._peers.pop(name, None)) is not None:  # the replica's earlier process
                    await gone_peer.channel.close(None)
                own = self._settings
                to = channel(replica.address, token=own.token, tls=own.tls, stack=own.stack)
                self._peers[name] = Peer(name, replica.address, to, self._stub(to))
            if (peer := self._peers.get(name)) is not None:
                weights = replica.weights if replica.HasField("weights") else None
                peer.ready = able
                peer.version = None if weights is None else weights.version
                peer.term = 0 if weights is None else weights.term
        for name, peer in list(self._peers.items()):
            if not peer.ready and not peer.open:  # closing its channel would end its calls
                del self._peers[name]
                await peer.channel.close(None)
        self._listed.set()

    def _no_replica(self) -> NoReplicaError:
        """Return the error for a call that finds no replica, with the reason."""
        ready, known = self.ready, self._known.values()
        starting = [one for one in known if one.state in _TO_COME]
        if not ready and (starting or not (self._came or known)):
            names = ", ".join(f"{one.replica_id} {one.detail}".rstrip() for one in starting[:3])
            return NoReplicaError(names or "no replica of it is registered yet", starting=True)
        names = ", ".join(peer.replica_id for peer in ready[:3])
        why = " or ".join(sorted({peer.avoided_why for peer in ready}))
        avoided = f" but those that {why} ({names})" if names else ""
        unable = [f"{one.replica_id}: {one.detail}" for one in known if one.detail and not self._is_able(one)]
        said = f" ({', '.join(unable[:3])})" if unable else ""
        return NoReplicaError(f"no {self.role} replica is ready{avoided}{said}")

    def _is_able(self, replica: CallableReplica) -> bool:
        is_ready = replica.state == REPLICA_STATE_READY and replica.run_id == self._run_id
        return is_ready and (replica.HasField("weights") or not self._serving)
