"""Channels to the replicas."""

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
"""How long a channel to a replica that is gone is kept: longer than anybody waits for one that is gone, because closing
a channel cancels the calls on it, and a cancelled call looks like a cancelled caller."""


class Peers:
    """One channel per address, made when it is needed first."""

    def __init__(self, token: str | None, tls: TlsFiles) -> None:
        """`token`: what every call carries, if any; `tls`: whom to trust, and as whom to appear."""
        self._token, self._tls = token, tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._needed: dict[str, float] = {}
        """When an address was last one of a replica, by the monotonic clock."""

    def trainer(self, address: str) -> TrainerStub:
        """The trainer at an address."""
        return TrainerStub(self._channel(address))

    def rollout(self, address: str) -> RolloutStub:
        """The rollout replica at an address."""
        return RolloutStub(self._channel(address))

    def reward(self, address: str) -> RewardStub:
        """The reward replica at an address."""
        return RewardStub(self._channel(address))

    def replica(self, address: str) -> ReplicaStub:
        """Any replica at an address."""
        return ReplicaStub(self._channel(address))

    def launcher(self, address: str) -> LauncherStub:
        """The launcher at an address."""
        return LauncherStub(self._channel(address))

    async def forget(self, current: set[str]) -> None:
        """Close channels that have not led to any replica for long; `current` are the addresses of all replicas."""
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
            self._channels[address] = channel(address, token=self._token, tls=self._tls)
        return self._channels[address]
