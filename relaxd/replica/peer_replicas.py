"""The replicas of another role that work on a run, found through the coordinator, for services that call them."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import grpc

from relaxd.rpc.client import channel
from relaxd.rpc.errors import explain
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1.coordinator_pb2 import ListReplicasRequest, RegisteredReplica
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_IDLE,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    REPLICA_STATE_UNSPECIFIED,
)

AVOIDED_SECONDS = 5.0
"""A replica that did not answer isn't called for this long; by then the coordinator knows if it has ended."""
LIST_SECONDS = 5.0
PAGE = 1000

_TO_COME = (REPLICA_STATE_UNSPECIFIED, REPLICA_STATE_IDLE, REPLICA_STATE_STARTING)
Stub = TypeVar("Stub")
_log = logging.getLogger(__name__)


class NoReplicaError(Exception):
    """No replica can be called now."""

    def __init__(self, message: str, *, starting: bool = False) -> None:
        """`starting` is true if the replicas have not failed, but are not there yet."""
        super().__init__(message)
        self.starting = starting


class Peer(Generic[Stub]):
    """A replica that can be called."""

    def __init__(self, replica_id: str, to: grpc.aio.Channel, stub: Stub) -> None:
        self.replica_id = replica_id
        self.channel = to
        self.stub = stub
        self.open = 0
        """Calls without a reply."""
        self.avoided_until = 0.0
        self.avoided_why = ""
        """Why it isn't called until then, such as "did not answer a moment ago"."""
        self.ready = True
        """By the last look."""
        self.version: int | None = None
        """Version of the weights that it serves, by the last look; None if it serves none."""
        self.term = 0
        """Term of the trainer that sent them."""

    @contextmanager
    def called(self) -> Iterator[Stub]:
        """Count a call as open inside the block, which makes it."""
        self.open += 1
        try:
            yield self.stub
        finally:
            self.open -= 1


class PeerReplicas(Generic[Stub]):
    """Finds the ready replicas of a role, and chooses those with the fewest open calls. Lives in one event loop."""

    def __init__(
        self,
        role: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        coordinator: CoordinatorStub,
        settings: ServiceSettings,
        run_id: str,
        *,
        look_seconds: Callable[[int], float],
        serving: bool = False,
    ) -> None:
        """Find nothing yet.

        Args:
            role: the role.
            stub: makes the stub of a replica's channel.
            coordinator: the coordinator.
            settings: of this process.
            run_id: the run.
            look_seconds: interval of looks at the coordinator while calls are made, by the number of replicas.
            serving: whether only replicas that serve weights can be called.
        """
        self.role = role
        self._stub = stub
        self._coordinator = coordinator
        self._settings = settings
        self._run_id = run_id
        self._look_seconds = look_seconds
        self._serving = serving
        self._peers: dict[str, Peer[Stub]] = {}
        """Replicas that are ready or still have a call, by id."""
        self._came = False
        """True once a replica was ready."""
        self._to_come: str | None = None
        """The replicas that are only starting, for people; None if there is another reason why none is ready."""
        self._unable = ""
        """Details of the replicas that can't be called, for people."""
        self._look_at = 0.0
        self._looking = asyncio.Lock()

    @property
    def ready(self) -> list[Peer[Stub]]:
        """The replicas that were ready at the last look."""
        return [peer for peer in self._peers.values() if peer.ready]

    async def choose(self, preferred: str = "", fits: Callable[[Peer[Stub]], bool] | None = None) -> Peer[Stub]:
        """Return the replica to call: the preferred one if it is able, else one with the fewest open calls.

        With `fits`, only replicas for which it returns True. Raises NoReplicaError.
        """
        if time.monotonic() >= self._look_at:
            await self.look()
        now = time.monotonic()
        able = [peer for peer in self.ready if peer.avoided_until <= now]
        if not able:
            if not self.ready and self._to_come is not None:
                raise NoReplicaError(self._to_come, starting=True)
            names = ", ".join(peer.replica_id for peer in self.ready[:3])
            why = " or ".join(sorted({peer.avoided_why for peer in self.ready}))
            known = f" but those that {why} ({names})" if names else ""
            said = f" ({self._unable})" if self._unable else ""
            raise NoReplicaError(f"no {self.role} replica is ready{known}{said}")
        if fits is not None and not (able := list(filter(fits, able))):
            raise NoReplicaError(f"no ready {self.role} replica serves the version")
        if (peer := self._peers.get(preferred)) in able:
            return peer
        fewest = min(peer.open for peer in able)
        return random.choice([peer for peer in able if peer.open == fewest])

    def avoid(self, peer: Peer[Stub], seconds: float = AVOIDED_SECONDS) -> None:
        """Call a replica that did not answer no more for a while, and look for others before the next call."""
        self.postpone(peer, seconds, "did not answer a moment ago")
        self._look_at = 0.0

    def postpone(self, peer: Peer[Stub], seconds: float, why: str) -> None:
        """Call a replica no more for so long. `why` goes on after "those that"."""
        peer.avoided_until, peer.avoided_why = time.monotonic() + seconds, why

    async def look(self) -> None:
        """Ask the coordinator which replicas there are. While it is away, those that were there stay."""
        asked_at = time.monotonic()
        async with self._looking:
            if asked_at < self._look_at:
                return  # somebody else has looked
            try:
                listed = await self._list()
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "calling the same %s replicas, because the coordinator is away: %s", self.role, explain(error)
                )
                self._look_at = time.monotonic() + LIST_SECONDS
                return
            found = {one.registration.replica_id: one for one in listed if self._is_able(one)}
            self._to_come = self._describe_start(listed)
            unable = [one for one in listed if one.status.detail and not self._is_able(one)]
            self._unable = ", ".join(f"{one.registration.replica_id}: {one.status.detail}" for one in unable[:3])
            self._came |= bool(found)
            self._look_at = time.monotonic() + self._look_seconds(len(found)) * bool(found)
            for name, replica in found.items():
                if name not in self._peers:
                    own = self._settings
                    to = channel(replica.registration.address, token=own.token, tls=own.tls, stack=own.stack)
                    self._peers[name] = Peer(name, to, self._stub(to))
                weights = replica.status.weights if replica.status.HasField("weights") else None
                self._peers[name].version = None if weights is None else weights.version
                self._peers[name].term = 0 if weights is None else weights.term
            for name, peer in list(self._peers.items()):
                peer.ready = name in found
                if not peer.ready and not peer.open:  # closing its channel would end its calls
                    del self._peers[name]
                    await peer.channel.close(None)

    async def close(self) -> None:
        """Close the connections."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            await peer.channel.close(None)

    async def _list(self) -> list[RegisteredReplica]:
        found: list[RegisteredReplica] = []
        token = ""
        while True:
            request = ListReplicasRequest(role=self.role, page_size=PAGE, page_token=token)
            answer = await self._coordinator.ListReplicas(request, timeout=LIST_SECONDS)
            found += answer.replicas
            if not (token := answer.next_page_token):
                return found

    def _describe_start(self, listed: list[RegisteredReplica]) -> str | None:
        """Name the replicas that are starting; None if there are none, though there were."""
        starting = [one for one in listed if one.status.state in _TO_COME]
        if not starting and (self._came or listed):
            return None
        names = [f"{one.registration.replica_id} {one.status.detail}".rstrip() for one in starting[:3]]
        return ", ".join(names) or "no replica of it is registered yet"

    def _is_able(self, replica: RegisteredReplica) -> bool:
        status = replica.status
        is_ready = status.state == REPLICA_STATE_READY and status.run_id == self._run_id
        return is_ready and (status.HasField("weights") or not self._serving)
