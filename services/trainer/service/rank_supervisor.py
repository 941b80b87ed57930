"""Supervision of a run's ranks: starts them, restarts them when one dies, announces versions to the coordinator."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from relaxd.process.child import ChildError
from relaxd.process.gpu_lease import GpuLease
from relaxd.rpc.client import channel
from relaxd.rpc.errors import Unavailable, explain
from relaxd.rpc.settings import ServiceSettings
from relaxd.v1 import coordinator_pb2, coordinator_pb2_grpc, replica_pb2, weights_pb2
from services.trainer.service.rank_processes import RankProcesses

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 30.0
"""Delay before a restart; doubled with each consecutive failure, until a version is trained."""
FAILED_AFTER = 3
"""Consecutive failures after which the replica counts as failed; restarts go on."""
DRAIN_MARGIN_SECONDS = 5.0
"""Extra time for the answer to a drain, in which rank 0 sends its last traces and metrics."""
ANNOUNCE_SECONDS = 10.0
"""Deadline of one announcement."""
ANNOUNCE_AGAIN_SECONDS = 0.5
"""Delay before an announcement is repeated."""


class RankSupervisor:
    """The ranks of one run, across restarts."""

    def __init__(
        self,
        settings: ServiceSettings,
        start: Mapping[str, Any],
        environment: Mapping[str, str],
        take_turn: Callable[[Callable[[str], None]], Awaitable[None]] | None = None,
        gpu_lease: GpuLease | None = None,
    ) -> None:
        """Supervise ranks that are not started yet.

        Args:
            settings: the service's settings.
            start: parameters of the ranks' start request.
            environment: environment variables, in addition to this process's.
            take_turn: in a colocated run, awaited before each start (ReplicaContext.take_turn).
            gpu_lease: the ranks are killed when it is over.
        """
        self._settings = settings
        self._environment = environment
        self._take_turn = take_turn
        self._gpu_lease = gpu_lease
        self.awake = False
        """Whether the ranks use the devices, in a colocated run."""
        self._start = dict(start)
        self._count: int = start["ranks"]
        self._ranks: RankProcesses | None = None
        self._failures = 0
        self._facts: dict[int, dict[str, Any]] = {}
        self._announcement = asyncio.Event()
        self._pause_task: asyncio.Task[None] | None = None
        self.term = 0
        self.version: int | None = None
        """Newest committed version; None before the first one of this term."""
        self.step_trace: dict[str, str] = {}
        """Trace context of the step that produced it."""
        self.detail = "starting the ranks"
        self.held_groups = 0
        self.done_groups = 0
        self._done_before = 0
        self.iterations = 0
        """Iterations of the training loop, as last reported by rank 0."""
        self.manifest = weights_pb2.WeightManifest()
        self.source_ranks = 0
        self.store_port = 0

    @property
    def colocated(self) -> bool:
        """Whether the ranks share their devices with engines."""
        return self._take_turn is not None

    @property
    def ready(self) -> bool:
        """Whether the ranks have weights."""
        return self.version is not None

    @property
    def state(self) -> replica_pb2.ReplicaState.ValueType:
        """State of the replica."""
        if self.ready:
            return replica_pb2.REPLICA_STATE_READY
        failed = self._failures >= FAILED_AFTER
        return replica_pb2.REPLICA_STATE_FAILED if failed else replica_pb2.REPLICA_STATE_STARTING

    @property
    def weights(self) -> replica_pb2.WeightVersion:
        """The newest committed weights."""
        return replica_pb2.WeightVersion(term=self.term, version=self.version or 0)

    @property
    def senders(self) -> list[int]:
        """Ranks that connect to the engines, by pipeline stage."""
        sources = [rank for rank, facts in self._facts.items() if facts["source"]]
        return sorted(sources, key=lambda rank: self._facts[rank]["stage"])

    @property
    def gatherers(self) -> list[int]:
        """Ranks that take part in a broadcast: the senders and the ranks that hold parts of their tensors."""
        return sorted(rank for rank, facts in self._facts.items() if facts["gathers"])

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return self._ranks.pids if self._ranks else []

    async def live(self) -> None:
        """Run the ranks and restart them when they fail, until cancelled."""
        async with channel(
            self._settings.coordinator, token=self._settings.token, tls=self._settings.tls
        ) as to_coordinator:
            announcing = asyncio.create_task(self._announce(coordinator_pb2_grpc.CoordinatorStub(to_coordinator)))
            try:
                while True:
                    if self._take_turn is not None:
                        await self._take_turn(self._set_detail)
                        self.awake = True
                    reason = await self._run_world()
                    delay = min(FIRST_DELAY_SECONDS * 2**self._failures, MAX_DELAY_SECONDS)
                    self._failures += 1
                    self.detail = f"the ranks restart in {delay:g} s: {reason}"
                    logger.error("%s", self.detail)
                    await asyncio.sleep(delay)
                    self.detail = f"the ranks are restarting: {reason}"
            finally:
                announcing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await announcing

    async def request(self, rank: int, method: str, params: Mapping[str, Any], timeout: float) -> Any:
        """Send a request to one rank.

        Raises:
            Unavailable: no ranks are running.
            ChildError: see `JsonChild.request`.
        """
        if self._ranks is None:
            raise Unavailable(f"the trainer's ranks aren't running: {self.detail}")
        return await self._ranks.request(rank, method, params, timeout)

    async def set_paused(self, paused: bool) -> None:
        """Pause or resume the ranks, also after restarts."""
        self._start["paused"] = paused
        if 0 in self._facts:
            await self._send_paused()

    async def change_sleep(self, *, asleep: bool, metrics: Mapping[str, float], seconds: float) -> dict[str, Any]:
        """Put the ranks to sleep or wake them up. Returns before and after (bytes in use) and seconds."""
        if not asleep:
            self.awake = True
        params = {"seconds": seconds, "metrics": dict(metrics)}
        change: dict[str, Any] = await self.request(0, "sleep" if asleep else "wake", params, seconds)
        self.awake = not asleep
        return change

    async def drain(self, seconds: float) -> int:
        """Stop taking groups and hand back the held ones. Returns the number of groups that are still held."""
        if self._ranks is None or 0 not in self._facts or self.term == 0:
            return 0
        with contextlib.suppress(ChildError, Unavailable):
            if await self.request(0, "drain", {"seconds": seconds}, seconds + DRAIN_MARGIN_SECONDS):
                self.held_groups = 0
        return self.held_groups

    async def _run_world(self) -> str:
        """Run the ranks until one fails; return the reason."""
        self._facts.clear()
        ranks = RankProcesses(self._count, self._on_event, self._environment, self._gpu_lease)
        self._ranks = ranks
        try:
            await ranks.start(self._start)
            return await ranks.failed()
        except ChildError as error:
            return str(error)
        finally:
            self._ranks, self.version = None, None
            self.term, self.held_groups = 0, 0
            self._done_before = self.done_groups
            self._announcement.clear()
            await ranks.kill()
            self.awake = False  # not earlier: dying ranks still use the devices

    def _on_event(self, rank: int, event: str, values: dict[str, Any]) -> None:
        match event:
            case "loaded":
                self._facts[rank] = values
                if rank == 0:  # it may have missed an earlier request
                    self._pause_task = asyncio.create_task(self._send_paused())
            case "term":
                self.term = values["term"]
                self.manifest = ParseDict(values["manifest"], weights_pb2.WeightManifest())
                self.source_ranks, self.store_port = values["source_ranks"], values["store_port"]
            case "progress":
                self.detail, self.held_groups = values["detail"], values["held"]
                self.done_groups = self._done_before + values["done"]
                self.iterations = values["iterations"]
            case "version":
                if self.version is not None:
                    self._failures = 0
                self.version, self.step_trace = values["version"], values["trace"]
                self._announcement.set()

    def _set_detail(self, detail: str) -> None:
        self.detail = detail

    async def _send_paused(self) -> None:
        with contextlib.suppress(ChildError, Unavailable):  # after a restart, the start request says it
            await self.request(0, "pause" if self._start["paused"] else "resume", {}, 10.0)

    async def _announce(self, coordinator: coordinator_pb2_grpc.CoordinatorStub) -> None:
        """Announce each version to the coordinator, retrying until the newest one arrives."""
        last_warning = 0.0
        while True:
            await self._announcement.wait()
            self._announcement.clear()
            if self.version is None:
                continue
            request = coordinator_pb2.AnnounceVersionRequest(
                run_id=self._start["run_id"], replica_id=self._settings.replica_id, weights=self.weights
            )
            try:
                trace = tuple(self.step_trace.items())
                await coordinator.AnnounceVersion(request, timeout=ANNOUNCE_SECONDS, metadata=trace)
            except grpc.aio.AioRpcError as error:
                if time.monotonic() - last_warning > 10:
                    last_warning = time.monotonic()
                    logger.warning("version %d can't be announced yet: %s", request.weights.version, explain(error))
                await asyncio.sleep(ANNOUNCE_AGAIN_SECONDS)
                self._announcement.set()
