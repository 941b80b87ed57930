"""Services of benchmarks/conversation_engine.py, each with one change.

`python -m benchmarks.conversation_engine_parts gpu NAME INDEX SHARE MODULE` starts a service that sees the GPU number
INDEX as one of its own, called NAME, so that services share a GPU that the coordinator would give to one of them; its
engine takes a SHARE of the memory. `... agent` starts an agent replica whose requests go where a file says (ROUTING).
"""

import os
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from relaxd.replica import gpus
from relaxd.replica.peer_replicas import Peer
from relaxd.v1.rollout_pb2_grpc import RolloutStub
from services.agent import agent_service
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


def share_gpu(name: str, index: int, share: str) -> None:
    """Show this process's service one GPU, of whose memory its engine takes a share."""
    if gpus.visible_gpus():
        gpus._all_gpus = lambda: (gpus.Gpu(f"GPU-{name}", index),)  # type: ignore[assignment]
        os.environ[gpus.SHARE_VARIABLE] = share


def main() -> None:
    """Start a service."""
    kind, *words = sys.argv[1:]
    if kind == "agent":
        agent_service.RunEngines = RoutedEngines  # type: ignore[misc]
        module = "services.agent"
    else:
        name, index, share, module = words
        share_gpu(name, int(index), share)
    sys.argv[1:] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
