"""gRPC channels to replicas and the launcher."""

import time

import grpc

from relaxd.rpc.client import channel
from relaxd.rpc.tls import TlsFiles
from relaxd.v1.launcher_pb2_grpc import LauncherStub
from relaxd.v1.replica_pb2_grpc import ReplicaStub
from relaxd.v1.reward_pb2_grpc import RewardStub
from relaxd.v1.rollout_pb2_grpc import RolloutStub
from relaxd.v1.trainer_pb2_grpc import TrainerStub

KEPT_SECONDS = 900.0
"""Lifetime of a channel to a lost replica: longer than any wait for one, because closing a channel cancels its calls,
and a cancelled call looks like a cancelled caller."""


class Peers:
    """One channel per address, opened on first use."""

    def __init__(self, token: str | None, tls: TlsFiles, term: int) -> None:
        """`token`: the bearer token of every call, if any; `tls`: trusted CAs and the client certificate; `term`: the
        coordinator's term, which every call carries."""
        self._token, self._tls, self._term = token, tls, term
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._needed: dict[str, float] = {}
        """Monotonic time at which an address was last that of a replica."""

    def trainer(self, address: str) -> TrainerStub:
        """Return a stub for the trainer at an address."""
        return TrainerStub(self._channel(address))

    def rollout(self, address: str) -> RolloutStub:
        """Return a stub for the rollout replica at an address."""
        return RolloutStub(self._channel(address))

    def reward(self, address: str) -> RewardStub:
        """Return a stub for the reward replica at an address."""
        return RewardStub(self._channel(address))

    def replica(self, address: str) -> ReplicaStub:
        """Return a stub for any replica at an address."""
        return ReplicaStub(self._channel(address))

    def launcher(self, address: str) -> LauncherStub:
        """Return a stub for the launcher at an address."""
        return LauncherStub(self._channel(address))

    async def forget(self, current: set[str]) -> None:
        """Close channels whose replica is long gone; `current`: the addresses in use."""
        now = time.monotonic()
        self._needed |= dict.fromkeys(current, now)
        for address in [a for a in self._channels if now - self._needed.setdefault(a, now) > KEPT_SECONDS]:
            del self._needed[address]
            await self._channels.pop(address).close(None)

    async def close(self) -> None:
        """Close every channel."""
        while self._channels:
            await self._channels.popitem()[1].close(None)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = channel(address, token=self._token, tls=self._tls, term=self._term)
        return self._channels[address]
