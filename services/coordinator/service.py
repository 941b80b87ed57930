"""The coordinator process: assembly, start and shutdown."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relaxd import PROTOCOL_VERSION, __version__, telemetry
from relaxd.board import AsyncBoard, BoardError
from relaxd.process.upkeep import stop_signals
from relaxd.replica.replica_service import ReplicaServicer
from relaxd.roles import COORDINATOR, REPLICA_ROLES
from relaxd.rpc.errors import Unavailable
from relaxd.rpc.server import RunningServer, Service, start_service
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ReplicaStatus
from relaxd.v1.replica_pb2_grpc import add_ReplicaServicer_to_server
from services.coordinator.api.server import CoordinatorService, start_keda_server
from services.coordinator.api.watch_streams import ReplicaFeed
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.runs.run_manager import RunManager
from services.coordinator.scaling.autoscaler import Autoscaler
from services.coordinator.scaling.launchers import Launchers
from services.coordinator.scaling.scaler import Scaler
from services.coordinator.state.store import AsyncStore, StoreUnavailable, Superseded

logger = logging.getLogger(__name__)


async def record_board(board: AsyncBoard) -> None:
    """Record a run's group counts and the queue length of every stage as metrics. Raises BoardError."""
    run = {"relaxd.run_id": board.run_id}
    counts = await board.counts()
    for name, value in (("published", counts.published), ("open", counts.open), ("trained", counts.trained)):
        telemetry.record(f"groups.{name}", value, run)
    for reason, dropped in counts.dropped_by_reason.items():
        telemetry.record("groups.dropped", dropped, {**run, "relaxd.reason": reason})
    for queue in await board.queues():
        stage = {**run, "relaxd.stage": queue.stage}
        telemetry.record("queue.waiting", queue.waiting, stage)
        telemetry.record("queue.held", queue.held, stage)


HEARTBEATS_PER_LEASE = 6
HOUSEKEEPING_SECONDS = 1.0
THREADS = 16
"""Number of threads for files, tokenisation and long ledgers. Other calls to Redis are awaited in the event loop."""
RETENTION_SECONDS = 60.0
"""Seconds between two rounds that delete expired runs."""


class CoordinatorProcess:
    """The coordinator process, with its services and background tasks."""

    def __init__(self, settings: ServiceSettings, store: AsyncStore) -> None:
        self._settings = settings
        self._store = store
        self._registry = Registry(
            store,
            lease_seconds=settings.lease_seconds,
            heartbeat_seconds=settings.lease_seconds / HEARTBEATS_PER_LEASE,
            gpu_lease_seconds=settings.gpu_lease_seconds,
        )
        self._replica_feed = ReplicaFeed(self._registry)
        self._peers = Peers(settings.token, settings.tls, store.term, settings.stack)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._manager = RunManager(store, self._registry, self._peers, settings, self._fail)
        launchers = Launchers(self._peers, settings.launcher)
        self._scaler = Scaler(store, self._registry, self._manager, launchers, self._fail)
        self._autoscaler = Autoscaler(self._manager, self._scaler, by_keda=bool(settings.keda_port))
        self._started = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Serve until the process gets a signal to end. Raises Superseded or Fenced if a newer coordinator has taken
        over; ServerError."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="shared"))
        stop = stop_signals()
        services = [
            Service(
                add_CoordinatorServicer_to_server,
                CoordinatorService(
                    self._manager,
                    self._registry,
                    self._replica_feed,
                    self._peers,
                    self._scaler,
                    self._autoscaler,
                    logs=self._settings.logs,
                ),
                "relaxd.v1.Coordinator",
            ),
            Service(
                add_ReplicaServicer_to_server,
                ReplicaServicer(self._status, self._drain, deadline_seconds=self._settings.deadline_seconds),
                "relaxd.v1.Replica",
            ),
        ]
        self._registry.load(await self._store.replicas(), await self._store.gpu_holders())
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._registry.expire_forever()),
            asyncio.ensure_future(self._replica_feed.look_forever()),
            asyncio.ensure_future(self._housekeeping()),
            asyncio.ensure_future(self._delete_expired_runs()),
            asyncio.ensure_future(stop.wait()),
        ]
        server: RunningServer | None = None
        keda: RunningServer | None = None
        try:
            # Resume the run before the server starts: a replica that got an empty assignment in between would drop its
            # groups.
            await self._manager.resume()
            await self._scaler.resume()
            tasks.append(asyncio.ensure_future(self._autoscaler.run_forever()))
            if self._settings.keda_port:
                keda = await start_keda_server(self._autoscaler, self._settings)
                tasks.append(asyncio.ensure_future(keda.server.wait_for_termination()))
            server = await start_service(services, self._settings)
            logger.info("coordinator %s, term %d, on %s:%d", __version__, self._store.term, server.host, server.port)
            await server.set_serving(True)
            done, _ = await asyncio.wait([*tasks, self._failed], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            if server is not None:
                await server.stop(min(1.0, self._settings.grace_seconds))
            if keda is not None:
                await keda.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._scaler.close()
            await self._manager.close()
            await self._peers.close()
            await self._store.close()

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _housekeeping(self) -> None:
        """Regularly close unused channels and record metrics. Raises Superseded if a newer coordinator has taken
        over."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)  # idle: looks again
            replicas = self._registry.all()
            launcher = {self._settings.launcher} - {""}
            await self._peers.forget({replica.registration.address for replica in replicas} | launcher)
            for role in REPLICA_ROLES:
                count = sum(replica.registration.role == role for replica in replicas)
                telemetry.record("replicas", count, {"relaxd.role": role})
            active = self._manager.active
            if telemetry.enabled() and active is not None:
                # The run's own loops log a Redis outage.
                with contextlib.suppress(BoardError):
                    await record_board(self._manager.board(active.record))
            # A superseded coordinator must not renew leases any more.
            with contextlib.suppress(StoreUnavailable):
                await self._store.check()
            if self._store.superseded:
                raise Superseded("a newer coordinator has taken over")

    async def _delete_expired_runs(self) -> None:
        """Delete expired runs every RETENTION_SECONDS."""
        while True:
            try:
                await self._manager.delete_expired()
            except Unavailable as error:
                logger.info("could not delete expired runs, retrying later: %s", error)
            await asyncio.sleep(RETENTION_SECONDS)  # idle: looks again

    def _status(self) -> ReplicaStatus:
        active = self._manager.active
        return ReplicaStatus(
            replica_id=self._settings.replica_id,
            role=COORDINATOR,
            state=REPLICA_STATE_READY,
            run_id=active.record.run_id if active else "",
            detail=f"term {self._store.term}",
            uptime_seconds=asyncio.get_running_loop().time() - self._started,
            package_version=__version__,
            protocol_version=PROTOCOL_VERSION,
        )

    def _drain(self, seconds: float) -> "asyncio.Future[int]":
        """Return a drain that is already complete: all state is in Redis, so nothing has to be finished."""
        drained: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        drained.set_result(0)
        return drained
