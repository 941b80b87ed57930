"""Supervises a run's ranks: starts all, restarts all when one dies, and announces versions to the coordinator."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from relaxd.process.child import ChildError
from relaxd.rpc.client import channel
from relaxd.rpc.errors import InvalidArgument, RpcError, Unavailable, explain
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import coordinator_pb2, coordinator_pb2_grpc, rank_pb2, replica_pb2, trainer_pb2
from relaxd.waiting import Backoff
from services.trainer.service.rank_processes import Rank, RankEvent, RankProcess, RankSet

logger = logging.getLogger(__name__)

TakeTurn = Callable[[Callable[[str], None]], Awaitable[None]]
"""Waits until this replica may use the devices of a colocated run. The argument is called with descriptions of the wait
(ReplicaContext.take_turn)."""
MakeRanks = Callable[[RankEvent, Callable[[str], None]], RankSet]
"""Creates a set of ranks. The first argument gets events of ranks, the second a text on what the start waits for."""
BACKOFF = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Backoff before the ranks restart: doubles with each consecutive failure, until a version is trained."""
FAILED_AFTER = 3
"""Number of consecutive failures of the ranks after which the replica counts as failed. Restarts continue."""
ANSWER_SECONDS = 5.0
"""Seconds after a drain's deadline in which rank 0 may still answer: it sends its last traces and metrics first."""
ANNOUNCE_SECONDS = 10.0
"""Deadline of a call that announces a version to the coordinator, in seconds."""
ANNOUNCE_AGAIN_SECONDS = 0.5
"""Seconds before a failed announcement is repeated."""


class RankSupervisor:
    """Runs the ranks of a run: restarts them after failures, and keeps what they report."""

    def __init__(
        self,
        settings: ServiceSettings,
        request: rank_pb2.WorkRequest,
        make_ranks: MakeRanks,
        *,
        take_turn: TakeTurn | None = None,
    ) -> None:
        """Prepare to run the ranks; `live` starts them.

        Args:
            settings: the service's settings.
            request: tells the ranks what to work on.
            make_ranks: makes the ranks of each start.
            take_turn: in a colocated run, awaited at each start once the ranks have loaded their code; else None.
        """
        self._settings = settings
        self._make_ranks = make_ranks
        self._take_turn = take_turn
        self.awake = False
        """True while the ranks use the devices of a colocated run."""
        self._request = request
        self._processes: RankSet | None = None
        self._awaits_others = False
        """True while a start waits for the trainer's other hosts, until the ranks have started or failed."""
        self._failures = 0
        self._announcement = asyncio.Event()
        self.weights = replica_pb2.WeightVersion()
        """Term and version of the newest committed weights; term 0 before the first since the ranks started."""
        self.step_trace: dict[str, str] = {}
        """Trace context of the step that produced the newest weights."""
        self.detail = "starting the ranks"
        self.wait: replica_pb2.ReplicaWait.ValueType = replica_pb2.REPLICA_WAIT_UNSPECIFIED
        """Typed code of the wait that `detail` describes."""
        self.start_refused = False
        """True if the last start of the ranks failed because the settings or the model are wrong."""
        self.held_groups = 0
        self.done_groups = 0
        self._done_before = 0
        self.changing_weights = False
        """True while an update changes the weights, or the ranks sleep, so that no broadcast can start."""
        self.iterations = 0
        """Number of iterations of the training loop, a sign of progress, as last reported by rank 0."""
        self.manifest = trainer_pb2.GetWeightManifestResponse()
        """Manifest of weight broadcasts, without store host and version; empty while the ranks load."""

    @property
    def colocated(self) -> bool:
        """True if the ranks take turns with engines on the same devices."""
        return self._take_turn is not None

    @property
    def ready(self) -> bool:
        """True if all ranks are loaded and have weights to broadcast."""
        return self.weights.term > 0 and all(rank.loaded for rank in self.ranks)

    @property
    def state(self) -> replica_pb2.ReplicaState.ValueType:
        """State of the trainer replica: ready, starting or failed."""
        if self.ready:
            return replica_pb2.REPLICA_STATE_READY
        failed = not self._awaits_others and (self.start_refused or self._failures >= FAILED_AFTER)
        return replica_pb2.REPLICA_STATE_FAILED if failed else replica_pb2.REPLICA_STATE_STARTING

    @property
    def ranks(self) -> Sequence[Rank]:
        """The running ranks, by number."""
        return self._processes.ranks if self._processes else []

    @property
    def rank0(self) -> RankProcess:
        """Rank 0. Raises Unavailable if no ranks are running."""
        if self._processes is None or not self._processes.ranks:
            raise Unavailable(f"the trainer's ranks aren't running: {self.detail}")
        return self._processes.rank0

    @property
    def senders(self) -> list[Rank]:
        """Ranks that send weights to the engines: one per pipeline stage."""
        return [rank for rank in self.ranks if rank.loaded and rank.loaded.source]

    @property
    def gatherers(self) -> list[Rank]:
        """Ranks that take part in a weight broadcast: senders, and ranks that hold parts of the senders' tensors."""
        return [rank for rank in self.ranks if rank.loaded and rank.loaded.gathers]

    async def live(self) -> None:
        """Run the ranks and restart them when they fail, until cancelled."""
        async with channel(
            self._settings.coordinator, token=self._settings.token, tls=self._settings.tls
        ) as to_coordinator:
            announcing = asyncio.create_task(self._announce(coordinator_pb2_grpc.CoordinatorStub(to_coordinator)))
            try:
                while True:
                    reason = await self._run_world()
                    self.start_refused = isinstance(reason, InvalidArgument)
                    self._failures += 1
                    delay = BACKOFF.pause(self._failures)
                    self._set_detail(f"the ranks restart in {delay:g} s: {reason}")
                    logger.error("%s", self.detail)
                    await asyncio.sleep(delay)  # named: `detail` says why
                    self._set_detail(f"the ranks are restarting: {reason}")
            finally:
                announcing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await announcing

    async def set_paused(self, paused: bool) -> None:
        """Pause or resume training, also across restarts of the ranks."""
        self._request.paused = paused  # restarted ranks get it with Work
        if self.ranks:
            await self.rank0.set_paused(paused)

    async def drain(self, seconds: float) -> int:
        """Stop taking groups, and hand back the held ones within `seconds`. Return the number still held."""
        if not self.manifest.source_ranks:
            return 0
        if self.ranks and await self.rank0.hand_back(seconds, timeout=seconds + ANSWER_SECONDS):
            self.held_groups = 0
        return self.held_groups

    async def _run_world(self) -> RpcError:
        """Start a set of ranks, wait until a rank fails, and kill all. Return the error."""
        self._processes = processes = self._make_ranks(self._on_event, self._await_others)
        try:
            await processes.start()
            self._awaits_others = False
            if self._take_turn is not None:
                await self._turn(processes, self._take_turn)
            processes.work(self._request)
            return await processes.failed()
        except ChildError as error:
            return error
        finally:
            self._awaits_others = False
            self._processes, self.held_groups = None, 0
            self.weights, self.changing_weights = replica_pb2.WeightVersion(), False
            self.manifest = trainer_pb2.GetWeightManifestResponse()
            self._done_before = self.done_groups
            self._announcement.clear()
            await processes.kill()
            self.awake = False  # not earlier: dying ranks still use the devices

    async def _turn(self, processes: RankSet, take_turn: TakeTurn) -> None:
        """Wait until the ranks may use the devices of a colocated run. Raises ChildError if a rank dies meanwhile."""
        turn, failed = asyncio.ensure_future(take_turn(self._set_detail)), asyncio.create_task(processes.failed())
        try:
            await asyncio.wait({turn, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise ChildError(str(await failed))
            await turn
            self.awake = True
        finally:
            turn.cancel()
            failed.cancel()

    def _on_event(self, rank: Rank, event: rank_pb2.WorkResponse) -> None:
        match event.WhichOneof("event"):
            case "loaded":
                rank.loaded = event.loaded
            case "manifest":
                self.manifest = event.manifest
            case "progress":
                self.detail, self.wait = event.progress.detail, event.progress.wait
                self.held_groups = event.progress.held_groups
                self.done_groups = self._done_before + event.progress.done_groups
                self.iterations = event.progress.iterations
                self.changing_weights = event.progress.changing_weights
            case "version":
                if self.weights.term:
                    self._failures = 0
                self.weights, self.step_trace = event.version.weights, dict(event.version.trace)
                self.changing_weights = self.start_refused = False
                self._announcement.set()

    def _await_others(self, detail: str) -> None:
        """Note that the start waits for other hosts, so that it doesn't count as stuck."""
        self._awaits_others = True
        self.iterations += 1
        self._set_detail(detail)

    def _set_detail(self, detail: str) -> None:
        self.detail, self.wait = detail, replica_pb2.REPLICA_WAIT_UNSPECIFIED

    async def _announce(self, coordinator: coordinator_pb2_grpc.CoordinatorStub) -> None:
        """Announce each version to the coordinator, retrying until the newest one arrives."""
        last_warning = 0.0
        while True:
            await self._announcement.wait()  # idle: no new version
            self._announcement.clear()
            if not self.weights.term:
                continue
            request = coordinator_pb2.AnnounceVersionRequest(
                run_id=self._request.run_id, replica_id=self._request.replica_id, weights=self.weights
            )
            try:
                trace = tuple(self.step_trace.items())
                await coordinator.AnnounceVersion(request, timeout=ANNOUNCE_SECONDS, metadata=trace)
            except grpc.aio.AioRpcError as error:
                if time.monotonic() - last_warning > 10:
                    last_warning = time.monotonic()
                    logger.warning("version %d can't be announced yet: %s", request.weights.version, explain(error))
                await asyncio.sleep(ANNOUNCE_AGAIN_SECONDS)  # named: a warning every 10 s
                self._announcement.set()
