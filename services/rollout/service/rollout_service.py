"""The rollout service: one engine per run, which works on the board's groups and is restarted when it exits."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from relaxd import telemetry
from relaxd.board import Board, StageWorker, stages_for
from relaxd.config import RunConfig
from relaxd.engines import ENGINES
from relaxd.models.folders import resolve_model
from relaxd.process.gpu_lease import GpuLease
from relaxd.replica.gpus import memory_used, wait_until_steady
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus
from relaxd.roles import ROLES, ROLLOUT
from relaxd.rpc.errors import FailedPrecondition, RpcError
from relaxd.run_folder import PROFILES
from relaxd.v1 import replica_pb2, rollout_pb2
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.waiting import Backoff, waiting
from relaxd.weights import NCCL_ENVIRONMENT
from services.rollout.engines.engine_interface import EngineStart, RolloutEngine
from services.rollout.service.child_engine import ALL_MEMORY, ChildEngine
from services.rollout.service.group_generator import GroupGenerator, Occupancy
from services.rollout.service.replica_engine import ReplicaEngine

DRAIN_POLL_SECONDS = 0.05
"""Interval between checks for agents' running requests during a drain, in seconds."""
QUEUE_FACTOR = 2
"""Maximum number of callers' samples that run or wait, as a multiple of rollout.max_running_samples. Waiting samples
keep the engine busy."""
RESTART_BACKOFF = Backoff(first_seconds=0.5, max_seconds=30.0)

logger = logging.getLogger(__name__)


class RolloutService(ReplicaService):
    """Rollout replica: generates groups and answers Generate calls with one engine.

    Takes groups while the engine serves a committed version and the run is not paused. In runs with an environment it
    takes no groups: agents send requests to the engine.
    """

    role = ROLLOUT
    engine_ranks = 1

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._settings = context.settings
        self._config: RunConfig | None = None
        self._board: Board | None = None
        self._worker: StageWorker | None = None
        self._generator: GroupGenerator | None = None
        self._engine: ReplicaEngine[RolloutEngine] = ReplicaEngine(context, ROLLOUT)
        self._restarting: asyncio.Task[None] | None = None
        self.occupancy = Occupancy()
        """Counter of the seconds that the engine was busy or paused."""
        self._run_id = ""
        self._run_folder = Path()
        self._run_paused = False
        self._done_before = 0

    @property
    def engine(self) -> RolloutEngine | None:
        """The run's engine; None before its model is loaded and after it has ended."""
        engine = self._engine.engine
        return engine if engine is not None and engine.alive and self._config is not None else None

    @property
    def colocated(self) -> bool:
        """True if the engine takes turns on its GPUs with a trainer."""
        return self._config is not None and self._config.run.colocate

    @property
    def max_queued_samples(self) -> int:
        """Maximum number of samples that run or wait in the Generate calls of all callers; 0 outside of a run."""
        return QUEUE_FACTOR * self._config.rollout.max_running_samples if self._config is not None else 0

    async def record(self, engine: ChildEngine, profile: rollout_pb2.ProfileRequest) -> list[str]:
        """Record the engine's next model steps into the run's folder. Returns the files. Raises FailedPrecondition."""
        folder = self._run_folder / PROFILES
        try:
            await asyncio.to_thread(folder.mkdir, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"{folder} can't be made: {error.strerror}. Profiles are written into the run's folder: mount it, "
                "writable, where this replica runs"
            ) from error
        return await engine.record(profile, folder, f"{self._settings.replica_id}-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        self._config, self._run_paused = config, False
        self._run_id, self._run_folder = assignment.run_id, Path(assignment.folder)
        rollout = config.rollout
        self.engine_ranks = rollout.tensor_parallel
        role = ROLES[ROLLOUT]
        await self._engine.lease(config)
        await self._start_engine(config)
        if not role.works_on(role.stage, config):
            return  # agents send requests to the engine
        self._board = Board(self._settings.redis, assignment.run_id, stages_for(config), config.board)
        self._generator = generator = GroupGenerator(
            config,
            self._board,
            lambda: self.engine,
            self.update_intake,
            self.occupancy,
            lambda group_id: worker.hold(group_id),
        )
        worker = StageWorker(
            self._board,
            "rollout",
            self._settings.replica_id,
            generator.process,
            concurrency=lambda: generator.room(worker.held),
            on_failure=self._context.give_up,
        )
        worker.pause()  # until there are weights
        self._worker = worker
        await asyncio.to_thread(worker.start)
        self.update_intake()

    async def stop_run(self) -> None:
        if self._generator is not None:
            await self._generator.cut_off()
        # Only now, because an engine that ends during `cut_off` is replaced.
        worker, board, restarting = self._worker, self._board, self._restarting
        self._worker = self._board = self._restarting = self._config = self._generator = None
        if restarting is not None:
            restarting.cancel()
            await asyncio.wait({restarting})
        if worker is not None:
            await asyncio.to_thread(worker.stop)
            self._done_before += worker.done
        await self._engine.stop()
        if board is not None:
            await asyncio.to_thread(board.close)

    async def pause_run(self) -> None:
        self._run_paused = True
        self.update_intake()

    async def resume_run(self) -> None:
        self._run_paused = False
        self.update_intake()

    async def drain(self, seconds: float) -> int:
        """Take no more groups, finish those held, and hand groups that are not finished in time back to the board.

        With rollout.partial.enabled, hand all groups back at once: other replicas continue them. In runs with agents,
        wait for agents' running requests; agents send new requests to other replicas.
        """
        worker, generator = self._worker, self._generator
        if worker is None or generator is None:
            return await self._await_agents(seconds)
        deadline = time.monotonic() + seconds - min(1.0, seconds / 4)  # handing back takes part of the time
        worker.pause()
        try:
            await generator.cut_off()
            handed_back = await asyncio.to_thread(worker.drain, max(0.0, deadline - time.monotonic()))
        finally:
            generator.cancel()
        if handed_back:
            logger.info("handed back %d unfinished groups", handed_back)
        return worker.held

    async def _await_agents(self, seconds: float) -> int:
        """Wait up to `seconds` for the end of agents' requests. Returns the number still running."""
        deadline = time.monotonic() + seconds - min(1.0, seconds / 4)
        with waiting("agents' requests, to drain"):
            while self._held_requests and time.monotonic() < deadline:
                await asyncio.sleep(DRAIN_POLL_SECONDS)  # named: above
        return self._held_requests

    @property
    def _held_requests(self) -> int:
        """Number of running requests of agents; 0 in runs whose groups the replica takes itself."""
        return self.occupancy.requests if self._config is not None and self._config.agent.is_there else 0

    def status(self) -> ServiceStatus:
        worker, engine = self._worker, self.engine
        state: replica_pb2.ReplicaState.ValueType | None = None
        weights, detail = None, self._engine.detail
        if engine is None:
            state = replica_pb2.REPLICA_STATE_STARTING
        elif engine.quarantined:
            state = replica_pb2.REPLICA_STATE_QUARANTINED
            detail = "a weight synchronisation failed halfway: not serving until the next one succeeds"
        elif engine.asleep == ALL_MEMORY:
            detail = "asleep: the trainer has the device"
        elif engine.weights is None or engine.asleep:
            detail = "waiting for weights"
        elif engine.unconfirmed:
            detail = "has received weights: not serving until a resume names them"
        else:
            weights = engine.weights.to_proto()
        gauges = dict(engine.gauges) if engine is not None else {}
        done = self._done_before + (worker.done if worker else 0)
        return ServiceStatus(
            held_groups=worker.held if worker else self._held_requests,
            done_groups=done,
            progress=done + (engine.tokens if engine is not None else 0) + self._engine.loaded_mebibytes,
            detail=detail,
            state=state,
            weights=weights,
            awake=self.colocated and (self._engine.loading or (engine is not None and engine.asleep != ALL_MEMORY)),
            gauges={**gauges, **self.occupancy.gauges(), "rss_bytes": self._engine.rss_bytes},
        )

    def update_intake(self) -> None:
        """Take groups if the engine serves usable weights and the run is not paused; otherwise stop taking groups."""
        worker, engine = self._worker, self.engine
        if worker is None:
            return
        if engine is not None and engine.serving and not self._run_paused:
            worker.resume()  # also wakes up a worker that waits for room
        else:
            worker.pause()

    async def _start_engine(self, config: RunConfig) -> None:
        engine, gpus, set_detail = ENGINES[config.rollout.engine], self._engine.gpus, self._engine.set_detail
        folder = await asyncio.to_thread(resolve_model, config.model.path) if engine.has_model else Path()

        async def start(environment: Mapping[str, str], gpu_lease: GpuLease | None) -> RolloutEngine:
            # Not beside a judge, which may use the same GPUs at any time: then SGLang measures only its own process.
            if config.run.colocate and len(gpus) > 1 and not config.roles.judge.shares_gpus:
                await wait_until_steady(lambda: memory_used(gpus), set_detail)
            started: RolloutEngine = await import_module(engine.module).start_engine(
                EngineStart(
                    config=config,
                    folder=folder,
                    settings=self._settings,
                    environment={**environment, **NCCL_ENVIRONMENT},
                    gpu_lease=gpu_lease,
                    set_detail=set_detail,
                    on_exit=self._on_engine_exit,
                    on_tokens=self._record_tokens,
                )
            )
            return started

        started = await self._engine.start(start, takes_turns=config.run.colocate)
        started.name = self._settings.replica_id

    def _record_tokens(self, count: int, per_second: float) -> None:
        telemetry.record("generate.tokens", count, {"relaxd.run_id": self._run_id})
        telemetry.record("generate.tokens_per_second", per_second, {"relaxd.run_id": self._run_id})
        self.update_intake()  # the engine may have quarantined itself at the end of a pause's lease

    def _on_engine_exit(self, reason: str) -> None:
        if self._engine.engine is None or self._config is None:
            return  # it exited while loading: start_run raises
        self._engine.engine, self._engine.detail = None, reason
        logger.error("%s", reason)
        self.update_intake()  # before its groups are released, or this replica would take them again
        self._restarting = asyncio.create_task(self._restart(self._config), name="restart the engine")

    async def _restart(self, config: RunConfig) -> None:
        """Start a new engine; retry until its model is loaded. The coordinator then notices that it needs weights."""
        for failures in itertools.count(1):
            try:
                await self._start_engine(config)
                return
            except (RpcError, OSError) as error:
                self._engine.detail = f"the engine did not start: {error}"
                delay = RESTART_BACKOFF.pause(failures)
                logger.error("%s; retrying in %g s", self._engine.detail, delay)
            await asyncio.sleep(delay)  # named: the status's detail says why

    async def close(self) -> None:
        """Stop serving the run, and stop its engine."""
        with contextlib.suppress(RpcError):
            await self.stop_run()
