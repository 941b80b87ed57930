"""Having a replica restarted: it is asked, and if it doesn't answer, its launcher."""

import logging

import grpc

from relaxd.rpc.errors import explain
from relaxd.v1.launcher_pb2 import LauncherRestartRequest
from relaxd.v1.replica_pb2 import GetStatusRequest, RestartRequest
from services.coordinator.fleet.peers import Peers
from services.coordinator.health.health_update import Ask, Way

logger = logging.getLogger(__name__)

ASK_SECONDS = 3.0
"""A replica that doesn't answer within this does not answer at all: it need only set a flag."""
PROBES = 2
"""Times that a replica whose heartbeats have stopped may fail to answer before it counts as frozen."""
LAUNCHER_SECONDS = 40.0


class Restarter:
    """Asks for restarts, of one run's replicas."""

    def __init__(self, peers: Peers, launcher: str, term: int) -> None:
        """`launcher`: its address; empty: there is none."""
        self._peers = peers
        self._launcher = launcher
        self._term = term
        self.troubles: dict[str, str] = {}
        """Why nothing came of the last time, by instance."""

    async def ask(self, ask: Ask) -> bool:
        """Have it restarted. False: its launcher doesn't know it, so it will never come back."""
        self.troubles.pop(ask.instance, None)
        if ask.way == Way.TELL and await self._told(ask):
            return True
        if ask.way == Way.PROBE and not await self._frozen(ask):
            return True
        if not self._launcher:
            self.troubles[ask.instance] = "it doesn't answer, and this coordinator has no launcher to kill it"
            return True
        # Where another process runs by now, only one that was insisted on goes.
        request = LauncherRestartRequest(
            instance=ask.instance, replica_id="" if ask.way == Way.INSIST else ask.replica_id, term=self._term
        )
        try:
            answer = await self._peers.launcher(self._launcher).Restart(request, timeout=LAUNCHER_SECONDS)
            logger.info("the launcher was asked to restart %s: %s", ask.instance, answer.detail)
        except grpc.aio.AioRpcError as error:
            self.troubles[ask.instance] = f"the launcher at {self._launcher} can't restart it: {explain(error)}"
            logger.warning("%s: %s", ask.instance, self.troubles[ask.instance])
            return error.code() != grpc.StatusCode.NOT_FOUND
        return True

    async def _frozen(self, ask: Ask) -> bool:
        """Whether the process is there and doesn't answer. One that answers was not heard for some other reason."""
        for _ in range(PROBES):
            try:
                await self._peers.replica(ask.address).GetStatus(GetStatusRequest(), timeout=ASK_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    return False  # it is gone, and whoever supervises it knows
                continue
            self.troubles[ask.instance] = "it answers, but its heartbeats don't come"
            return False
        logger.warning("%s is there, but doesn't answer", ask.replica_id)
        return True

    async def _told(self, ask: Ask) -> bool:
        """Whether the process ends by itself, or is another one by now."""
        request = RestartRequest(replica_id=ask.replica_id, reason=ask.reason)
        try:
            await self._peers.replica(ask.address).Restart(request, timeout=ASK_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.info("%s doesn't answer: %s", ask.replica_id, explain(error))
            return error.code() == grpc.StatusCode.FAILED_PRECONDITION
        return True
