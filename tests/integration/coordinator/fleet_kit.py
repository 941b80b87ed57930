"""A coordinator's view of a run, with real servers in place of its replicas, in one process."""

import contextlib
from typing import Any

from relaxd.board import stages_for
from relaxd.config import RunConfig
from relaxd.roles import REPLICA_ROLES
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.rpc.server import start_server
from relaxd.rpc.tls import TlsFiles
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ReplicaStatus
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.fleet.run_fleet import Fleet, RunContext
from services.coordinator.state.store import AsyncStore, RunBoard, Store
from tests.integration.coordinator.cluster import Cluster

RUN = "run"


class FleetKit:
    """Registers servers under names and sends heartbeats on request."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self.store = AsyncStore(Store(redis_url))
        self.store.in_threads.take_over()
        self.registry = Registry(self.store, lease_seconds=60, heartbeat_seconds=0.1, gpu_lease_seconds=60)
        self.peers = Peers(None, TlsFiles(), 1)
        self.fleet = Fleet(self.registry, RUN, REPLICA_ROLES)
        self._life = contextlib.AsyncExitStack()

    def context(self, config: RunConfig) -> RunContext:
        board = RunBoard(self._redis_url, RUN, stages_for(config), config.board)
        self._life.push_async_callback(board.close)
        return RunContext(RUN, config, board, self.store, self.fleet, self.peers)

    async def serve(self, name: str, role: str, *service: Any, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Start a server with one service: add function, servicer, full name. Its replica is ready."""
        server = await start_server([service], max_message_bytes=max_message_bytes)  # type: ignore[list-item]
        self._life.push_async_callback(server.stop)
        await self.registry.register(
            Registration(replica_id=name, role=role, address=f"127.0.0.1:{server.port}", protocol_version=1)
        )
        self.beat(name)

    def beat(self, name: str, **status: Any) -> None:
        """Send a heartbeat."""
        self.registry.heartbeat(name, ReplicaStatus(state=REPLICA_STATE_READY, run_id=RUN, **status))

    async def lose(self, name: str) -> None:
        """End a replica's lease."""
        replica = self.registry.get(name)
        assert replica is not None
        await self.registry.remove([replica])

    async def close(self) -> None:
        await self.peers.close()
        await self._life.aclose()


def holders(cluster: Cluster) -> dict[str, list[str]]:
    replicas = cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
    return {r.registration.replica_id: list(r.leased_gpu_uuids) for r in replicas}
