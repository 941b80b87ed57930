"""Restarts of replicas: by a call to the replica, else by its launcher."""

import logging

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.launcher_pb2 import LauncherRestartRequest
from relaxd.v1.replica_pb2 import GetStatusRequest, RestartRequest
from services.coordinator.fleet.peers import Peers
from services.coordinator.health.health_update import RestartMode, RestartOrder

logger = logging.getLogger(__name__)

CALL_SECONDS = 3.0
"""Deadline of calls that only set a flag: a replica that misses it is frozen."""
PROBES = 2
"""Unanswered calls after which a replica without heartbeats counts as frozen."""
LAUNCHER_SECONDS = 40.0


class Restarter:
    """Restarts the replicas of one run."""

    def __init__(self, peers: Peers, launcher: str) -> None:
        """`launcher`: address of the launcher; empty: there is none."""
        self._peers = peers
        self._launcher = launcher
        self.failures: dict[str, str] = {}
        """Error of the last restart, by instance."""

    async def restart(self, order: RestartOrder) -> bool:
        """Restart a replica; returns False if the launcher doesn't know it, so that it will never come back."""
        self.failures.pop(order.instance, None)
        if order.mode == RestartMode.REQUEST and await self._request(order):
            return True
        if order.mode == RestartMode.PROBE and not await self._frozen(order):
            return True
        if not self._launcher:
            self.failures[order.instance] = "it doesn't answer, and this coordinator has no launcher to kill it"
            return True
        # Without FORCE the launcher must not kill a newer process of the instance.
        request = LauncherRestartRequest(
            instance=order.instance, replica_id="" if order.mode == RestartMode.FORCE else order.replica_id
        )
        try:
            answer = await self._peers.launcher(self._launcher).Restart(request, timeout=LAUNCHER_SECONDS)
            logger.info("asked the launcher to restart %s: %s", order.instance, answer.detail)
        except grpc.aio.AioRpcError as error:
            self.failures[order.instance] = f"the launcher at {self._launcher} can't restart it: {explain(error)}"
            logger.warning("%s: %s", order.instance, self.failures[order.instance])
            return error.code() != grpc.StatusCode.NOT_FOUND
        return True

    async def _frozen(self, order: RestartOrder) -> bool:
        """Return whether the process runs but doesn't answer."""
        for _ in range(PROBES):
            try:
                await self._peers.replica(order.address).GetStatus(GetStatusRequest(), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    return False  # it is gone, and its supervisor knows
                continue
            self.failures[order.instance] = "it answers calls, but sends no heartbeats"
            return False
        logger.warning("%s runs, but doesn't answer", order.replica_id)
        return True

    async def _request(self, order: RestartOrder) -> bool:
        """Ask the process to end; returns whether it will, or was replaced already."""
        request = RestartRequest(replica_id=order.replica_id, reason=order.reason)
        try:
            await self._peers.replica(order.address).Restart(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.info("%s doesn't answer: %s", order.replica_id, explain(error))
            return error.code() == grpc.StatusCode.FAILED_PRECONDITION
        return True
