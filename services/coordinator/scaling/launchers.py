"""Starts, drains and removes replicas: through the launcher, or with Join and Leave for replicas given by address."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import grpc

from relaxd import telemetry
from relaxd.rpc.errors import explain
from relaxd.v1.launcher_pb2 import (
    INSTANCE_STATE_FAILED,
    Instance,
    LaunchRequest,
    ListInstancesRequest,
    RemoveRequest,
)
from relaxd.v1.replica_pb2 import DrainRequest, JoinRequest, LeaveRequest
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Replica
from services.coordinator.state.records import ScaledReplica

EXTERNAL = "external-"
"""Prefix of the launch id of a replica given by address; the address follows."""
SGLANG = "sglang-"
"""Prefix of the launch id of a replica whose SGLang server is given by URL; host and port follow."""
LAUNCH_SECONDS = 60.0
JOIN_SECONDS = 10.0
DRAIN_MARGIN_SECONDS = 2.0
ENDING_SECONDS = 5.0
"""Maximum time to remove a replica after its grace period, in seconds."""
LISTED_SECONDS = 0.9
"""Seconds for which a listing of the launcher's instances is reused. Less than the time between a launch and its first
check, so that the check always uses a listing begun after the launch."""
LISTED_TOGETHER = 1000
"""Maximum number of instances per page of a listing."""
CALLS_AT_ONCE = 16
"""Maximum number of concurrent starts and removals, so that no call spends its deadline behind hundreds of others."""
NO_LAUNCHER = "this coordinator has no launcher: start it with --launcher / RELAXD_LAUNCHER"
PASSING = (
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
    *(grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
"""gRPC status codes of errors after which a retry may succeed."""


class LauncherError(Exception):
    """A replica could not be created, drained or removed; the message is the reason."""

    def __init__(self, message: str, *, passing: bool) -> None:
        """`passing`: True if a retry may succeed."""
        super().__init__(message)
        self.passing = passing


class Launchers:
    """Makes the calls to the launcher, if any, and to replicas given by address."""

    def __init__(self, peers: Peers, address: str) -> None:
        """`address`: the launcher's address; empty if there is no launcher."""
        self._peers = peers
        self.address = address
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)
        self._listing: tuple[float, asyncio.Task[dict[str, Instance]]] | None = None
        """Last listing of the launcher's instances: monotonic time of its beginning, and its task."""

    async def create(self, replica: ScaledReplica, role: str) -> None:
        """Start a replica through the launcher, or ask a replica given by address to join; idempotent. Raises
        LauncherError."""
        attributes = {"relaxd.launch_id": replica.launch_id, "relaxd.role": role}
        async with self._calls:
            with telemetry.root_span("launch", attributes=attributes), self._errors("could not be started", replica):
                if address := external_address(replica):
                    await self._join(replica.launch_id, address, role)
                    return
                self._require_launcher()
                request = LaunchRequest(
                    launch_id=replica.launch_id, role=role, gpu_uuids=replica.gpu_uuids, sglang_url=replica.sglang_url
                )
                await self._peers.launcher(self.address).Launch(request, timeout=LAUNCH_SECONDS)

    async def instance(self, replica: ScaledReplica) -> Instance:
        """Return the launcher's state of a replica; FAILED if the replica is gone. Raises LauncherError."""
        if external_address(replica):
            return Instance(launch_id=replica.launch_id)
        self._require_launcher()
        with self._errors("can't be looked up", replica):
            instances = await self._instances()
        return instances.get(replica.launch_id) or Instance(state=INSTANCE_STATE_FAILED, detail="it is gone")

    async def _instances(self) -> dict[str, Instance]:
        """Return the launcher's instances by launch id. Calls within LISTED_SECONDS share one listing."""
        now = time.monotonic()
        if self._listing is None or now - self._listing[0] > LISTED_SECONDS:
            self._listing = now, asyncio.create_task(self._list_instances())
        return await asyncio.shield(self._listing[1])

    async def _list_instances(self) -> dict[str, Instance]:
        found: dict[str, Instance] = {}
        request = ListInstancesRequest(page_size=LISTED_TOGETHER)
        while True:
            answer = await self._peers.launcher(self.address).ListInstances(request, timeout=JOIN_SECONDS)
            found |= {instance.launch_id: instance for instance in answer.instances}
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def drain(self, replica: Replica, seconds: float) -> int:
        """Ask a replica to drain within `seconds`. Returns the number of groups that the replica still holds. Raises
        LauncherError."""
        stub = self._peers.replica(replica.registration.address)
        try:
            answer = await stub.Drain(DrainRequest(), timeout=seconds + DRAIN_MARGIN_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise LauncherError(f"{replica.replica_id} doesn't drain: {explain(error)}", passing=True) from error
        return int(answer.held_groups)

    async def remove(self, replica: ScaledReplica, grace_seconds: float) -> None:
        """Stop a replica through the launcher, or ask one given by address to leave; wait until it is gone. Raises
        LauncherError."""
        seconds, attributes = grace_seconds + ENDING_SECONDS, {"relaxd.launch_id": replica.launch_id}
        async with self._calls:
            with telemetry.root_span("remove", attributes=attributes), self._errors("could not be removed", replica):
                if address := external_address(replica):
                    leave = LeaveRequest(launch_id=replica.launch_id)
                    await self._peers.replica(address).Leave(leave, timeout=seconds)
                    return
                self._require_launcher()
                remove = RemoveRequest(launch_id=replica.launch_id, grace_seconds=grace_seconds)
                await self._peers.launcher(self.address).Remove(remove, timeout=seconds)

    async def _join(self, launch_id: str, address: str, role: str) -> None:
        stub = self._peers.replica(address)
        answer = await stub.Join(JoinRequest(launch_id=launch_id), timeout=JOIN_SECONDS)
        if answer.role != role:
            await stub.Leave(LeaveRequest(launch_id=launch_id), timeout=JOIN_SECONDS)
            raise LauncherError(f"{address} is {answer.replica_id}, of role {answer.role}, not {role}", passing=False)

    def _require_launcher(self) -> None:
        if not self.address:
            raise LauncherError(NO_LAUNCHER, passing=False)

    @contextmanager
    def _errors(self, problem: str, replica: ScaledReplica) -> Iterator[None]:
        """Turn gRPC errors of calls about a replica into LauncherError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            target = external_address(replica) or f"the launcher at {self.address}"
            raise LauncherError(f"{problem}: {target}: {explain(error)}", passing=error.code() in PASSING) from error


def external_address(replica: ScaledReplica) -> str:
    """Return the address of a replica that was given by address; "" for a launched one."""
    return replica.launch_id.removeprefix(EXTERNAL) if replica.launch_id.startswith(EXTERNAL) else ""


def sglang_launch_id(url: str) -> str:
    """Return the launch id of an SGLang server's replica, made from its URL: each server has only one replica."""
    return SGLANG + re.sub(r"[^A-Za-z0-9.]+", "-", urlsplit(url).netloc.strip("[]").lower())
