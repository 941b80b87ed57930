"""The agent replica of benchmarks/conversation_engine.py, whose requests go where a file says (ROUTING)."""

import os
import random
import runpy
from collections.abc import Callable
from pathlib import Path

from relaxd.replica.peer_replicas import Peer
from relaxd.v1.rollout_pb2_grpc import RolloutStub
from services.agent import service
from services.agent.engines import EngineSession, RunEngines

ROUTING = "BENCHMARK_ROUTING"
"""Environment variable with the path of a file that has one of the keys of `ROUTES`."""
STICKY, ELSEWHERE, ONE = "sticky", "elsewhere", "one"


def elsewhere(session: EngineSession, ready: list[str]) -> str:
    """Return another engine than that of the last request."""
    return random.choice([name for name in ready if name != session.engine] or ready)


ROUTES: dict[str, Callable[[EngineSession, list[str]], str]] = {
    STICKY: lambda session, ready: session.engine,
    ELSEWHERE: elsewhere,
    ONE: lambda session, ready: min(ready),
}
"""Return the engine that a request should go to, given those that are ready."""


class RoutedEngines(RunEngines):
    """Sends requests where the file says."""

    async def _serving(self, session: EngineSession) -> Peer[RolloutStub]:
        if ready := [peer.replica_id for peer in self._peers.ready]:
            session.engine = ROUTES[Path(os.environ[ROUTING]).read_text()](session, ready)
        return await super()._serving(session)


def main() -> None:
    """Start the replica."""
    service.RunEngines = RoutedEngines  # type: ignore[misc]
    runpy.run_module("services.agent", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
