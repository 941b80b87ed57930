"""Channels to the replicas."""

import grpc

from relaxd.rpc.client import channel
from relaxd.v1.replica_pb2_grpc import ReplicaStub
from relaxd.v1.reward_pb2_grpc import RewardStub
from relaxd.v1.rollout_pb2_grpc import RolloutStub
from relaxd.v1.trainer_pb2_grpc import TrainerStub


class Peers:
    """One channel per address, made when it is needed first."""

    def __init__(self, token: str | None) -> None:
        """`token`: what every call carries, if any."""
        self._token = token
        self._channels: dict[str, grpc.aio.Channel] = {}

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

    async def forget(self, addresses: set[str]) -> None:
        """Close the channels to all addresses but these."""
        for address in set(self._channels) - addresses:
            await self._channels.pop(address).close(None)

    async def close(self) -> None:
        """Close every channel."""
        await self.forget(set())

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = channel(address, token=self._token)
        return self._channels[address]
