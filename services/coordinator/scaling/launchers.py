"""How replicas come to be and end: a launcher starts and removes them; those given by address join and leave."""

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.launcher_pb2 import (
    INSTANCE_STATE_FAILED,
    LaunchRequest,
    ListRequest,
    RemoveRequest,
)
from relaxd.v1.replica_pb2 import JoinRequest, LeaveRequest, Role
from services.coordinator.fleet.peers import Peers
from services.coordinator.state.scale_records import ScaledReplica

EXTERNAL = "external-"
"""The launch id of a replica that was given by address is this, then the address."""
LAUNCH_SECONDS = 60.0
JOIN_SECONDS = 10.0
ENDING_SECONDS = 5.0
"""What removing takes beside a replica's own grace."""
NO_LAUNCHER = "this coordinator has no launcher: start it with --launcher / RELAXD_LAUNCHER"
PASSING = (
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
    *(grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
"""Statuses that may be gone at the next attempt."""


class LauncherError(Exception):
    """A replica could not be created or removed; the message says why."""

    def __init__(self, message: str, *, passing: bool) -> None:
        """`passing`: another attempt may succeed."""
        super().__init__(message)
        self.passing = passing


class Launchers:
    """The coordinator's launcher, if it has one, and the replicas that are given by address."""

    def __init__(self, peers: Peers, address: str, term: int) -> None:
        """`address` of the launcher; empty: there is none."""
        self._peers = peers
        self._term = term
        self.address = address

    async def create(self, replica: ScaledReplica, role: str) -> None:
        """Have a replica started, or asked to join. Doing it twice is doing it once. Raises LauncherError."""
        try:
            if address := external_address(replica):
                await self._join(replica.launch_id, address, role)
            else:
                self._require_launcher()
                request = LaunchRequest(
                    launch_id=replica.launch_id, role=role.lower(), gpu_uuids=replica.gpu_uuids, term=self._term
                )
                await self._peers.launcher(self.address).Launch(request, timeout=LAUNCH_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._explained("could not be started", replica, error) from error

    async def failure(self, replica: ScaledReplica) -> str:
        """Why a replica that was created will never be there; empty as long as it may. Raises LauncherError."""
        if external_address(replica):
            return ""
        self._require_launcher()
        try:
            answer = await self._peers.launcher(self.address).List(ListRequest(), timeout=JOIN_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._explained("can't be looked up", replica, error) from error
        instance = next((i for i in answer.instances if i.launch_id == replica.launch_id), None)
        if instance is None:
            return "it is gone"
        return instance.detail or "it ended" if instance.state == INSTANCE_STATE_FAILED else ""

    async def remove(self, replica: ScaledReplica, grace_seconds: float) -> None:
        """End a replica, or ask it to leave; returns once it is gone. Raises LauncherError."""
        seconds = grace_seconds + ENDING_SECONDS
        try:
            if address := external_address(replica):
                leave = LeaveRequest(launch_id=replica.launch_id)
                await self._peers.replica(address).Leave(leave, timeout=seconds)
            else:
                self._require_launcher()
                remove = RemoveRequest(launch_id=replica.launch_id, grace_seconds=grace_seconds, term=self._term)
                await self._peers.launcher(self.address).Remove(remove, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise self._explained("could not be removed", replica, error) from error

    async def _join(self, launch_id: str, address: str, role: str) -> None:
        stub = self._peers.replica(address)
        answer = await stub.Join(JoinRequest(launch_id=launch_id), timeout=JOIN_SECONDS)
        if answer.role != Role.Value(f"ROLE_{role}"):
            await stub.Leave(LeaveRequest(launch_id=launch_id), timeout=JOIN_SECONDS)
            other = Role.Name(answer.role).removeprefix("ROLE_").lower()
            raise LauncherError(f"{address} is {answer.replica_id}, of role {other}, not {role.lower()}", passing=False)

    def _require_launcher(self) -> None:
        if not self.address:
            raise LauncherError(NO_LAUNCHER, passing=False)

    def _explained(self, what: str, replica: ScaledReplica, error: grpc.aio.AioRpcError) -> LauncherError:
        who = external_address(replica) or f"the launcher at {self.address}"
        return LauncherError(f"{what}: {who}: {explain(error)}", passing=error.code() in PASSING)


def external_address(replica: ScaledReplica) -> str:
    """Address of a replica that was given by it; empty for one that a launcher started."""
    return replica.launch_id.removeprefix(EXTERNAL) if replica.launch_id.startswith(EXTERNAL) else ""
