"""gRPC channels to replicas and the launcher, and supervision of calls that may take arbitrarily long."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from relaxd.rpc.client import channel
from relaxd.rpc.tls import TlsFiles
from relaxd.v1.agent_pb2_grpc import AgentStub
from relaxd.v1.judge_pb2_grpc import JudgeStub
from relaxd.v1.launcher_pb2_grpc import LauncherStub
from relaxd.v1.replica_pb2_grpc import ReplicaStub
from relaxd.v1.reward_pb2_grpc import RewardStub
from relaxd.v1.rollout_pb2 import JoinWeightGroupResponse
from relaxd.v1.rollout_pb2_grpc import RolloutStub
from relaxd.v1.trainer_pb2_grpc import TrainerStub
from services.coordinator.fleet.registry import Registry, Replica

KEPT_SECONDS = 900.0
"""Seconds for which a channel to a lost replica stays open.

This is longer than any wait for a lost replica: closing a channel cancels its calls, which callers would mistake for
their own cancellation.
"""

JOIN_WEIGHT_GROUP = "/relaxd.v1.Rollout/JoinWeightGroup"
Stub = TypeVar("Stub")


class Peers:
    """Keeps one gRPC channel per address of a replica or launcher, opened on first use."""

    def __init__(self, token: str | None, tls: TlsFiles, term: int, stack: str | None = None) -> None:
        """Every call carries `token` as bearer token, if any, the coordinator's `term`, and `stack`, the stack's
        identity (default: from the environment). `tls` has the trusted CAs and the client certificate."""
        self._token, self._tls, self._term = token, tls, term
        self._stack = stack
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, dict[Any, Any]] = {}
        """Stubs by address and stub class."""
        self._needed: dict[str, float] = {}
        """Monotonic time at which each address was last in use, in seconds."""

    def trainer(self, address: str) -> TrainerStub:
        """Return a stub for the trainer at an address."""
        return self._stub(TrainerStub, address)

    def rollout(self, address: str) -> RolloutStub:
        """Return a stub for the rollout replica at an address."""
        return self._stub(RolloutStub, address)

    def agent(self, address: str) -> AgentStub:
        """Return a stub for the agent replica at an address."""
        return self._stub(AgentStub, address)

    def judge(self, address: str) -> JudgeStub:
        """Return a stub for the judge replica at an address."""
        return self._stub(JudgeStub, address)

    def reward(self, address: str) -> RewardStub:
        """Return a stub for the reward replica at an address."""
        return self._stub(RewardStub, address)

    def replica(self, address: str) -> ReplicaStub:
        """Return a stub for any replica at an address."""
        return self._stub(ReplicaStub, address)

    def launcher(self, address: str) -> LauncherStub:
        """Return a stub for the launcher at an address."""
        return self._stub(LauncherStub, address)

    def join_weight_group(self, address: str, request: bytes, timeout: float) -> Awaitable[JoinWeightGroupResponse]:
        """Call Rollout.JoinWeightGroup with a request that is already encoded as bytes."""
        call = self._channel(address).unary_unary(
            JOIN_WEIGHT_GROUP, request_serializer=None, response_deserializer=JoinWeightGroupResponse.FromString
        )
        answer: Awaitable[JoinWeightGroupResponse] = call(request, timeout=timeout)
        return answer

    async def forget(self, current: set[str]) -> None:
        """Close channels of replicas that are long gone. `current` has the addresses in use."""
        now = time.monotonic()
        self._needed |= dict.fromkeys(current, now)
        for address in [a for a in self._channels if now - self._needed.setdefault(a, now) > KEPT_SECONDS]:
            del self._needed[address]
            self._stubs.pop(address, None)
            await self._channels.pop(address).close(None)

    async def close(self) -> None:
        """Close the channels to all addresses."""
        self._stubs.clear()
        while self._channels:
            await self._channels.popitem()[1].close(None)

    def _stub(self, kind: Callable[[Any], Stub], address: str) -> Stub:
        stubs = self._stubs.setdefault(address, {})
        if kind not in stubs:
            stubs[kind] = kind(self._channel(address))
        stub: Stub = stubs[kind]
        return stub

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = channel(
                address, token=self._token, tls=self._tls, term=self._term, stack=self._stack
            )
        return self._channels[address]


Result = TypeVar("Result")

LONG_CALL_SECONDS = 7 * 86400.0
"""Deadline, in seconds, of calls of unknown length; `answer` cancels a call without progress much earlier."""
POLL_SECONDS = 0.5


class NoAnswer(Exception):
    """A call got no answer: the replica is gone, or makes no progress."""


async def answer(
    call: Awaitable[Result], replica: Replica, registry: Registry, stall_seconds: float = float("inf")
) -> Result:
    """Await a call to a replica. Cancel it once the replica is gone or its status.progress stalls for `stall_seconds`.

    Raises NoAnswer after cancelling the call, and any error of the call.
    """
    task = asyncio.ensure_future(call)
    progress, silent, last = replica.status.progress, 0.0, time.monotonic()
    try:
        while True:
            await asyncio.wait({task}, timeout=POLL_SECONDS)  # named: by the callers, of whom there may be many
            if task.done():
                return task.result()
            now = time.monotonic()
            silent += min(now - last, 2 * POLL_SECONDS)  # less the time in which this process itself was suspended
            last = now
            current = registry.get(replica.replica_id)
            if current is None:
                raise NoAnswer(f"{replica.replica_id} is gone")
            if current.status.progress != progress:
                progress, silent = current.status.progress, 0.0
            elif silent > stall_seconds:
                raise NoAnswer(f"{replica.replica_id} has made no progress for {silent:.0f} s")
    finally:
        task.cancel()
