"""The teacher as a replica: one SGLang engine with a model that nobody trains, which works on the stage `teacher`."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil

from relaxd.algorithms import create
from relaxd.board import TEACHER_PROMPT_TOKENS, Column, Delivery, roles_for, stages_for
from relaxd.board.worker import Process, Result
from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model
from relaxd.models.vocabulary import check_vocabularies, vocab_size
from relaxd.process.child import ChildExit
from relaxd.replica.gpus import gpu_environment
from relaxd.replica.replica_context import ReplicaContext
from relaxd.replica.service_interface import ServiceStatus
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import ROLES, TEACHER
from relaxd.rpc.errors import FailedPrecondition, RpcError
from relaxd.v1.coordinator_pb2 import Assignment
from services.rollout.service.child_engine import ChildEngine, loaded_mebibytes
from services.rollout.teacher.teacher_columns import TeacherColumns

MODULE = "services.rollout.teacher"
SETTINGS = {"rollout.dtype": "trainer.dtype", "rollout.sglang": "roles.teacher.sglang"} | {
    f"rollout.{name}": f"roles.teacher.{name}" for name in ("tensor_parallel", "memory_fraction")
}
"""The teacher's settings, by the names under which the engine knows them."""

logger = logging.getLogger(__name__)


class TeacherService(StageReplica):
    """Owns the engine. When it exits, so does this replica, and its supervisor starts another."""

    role = TEACHER
    stage = ROLES[TEACHER].stage
    max_connection_age_seconds = None  # nobody calls it but the coordinator

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self._engine: ChildEngine | None = None
        self._columns: TeacherColumns | None = None
        self._loading = False
        self._detail = ""
        self._turns = 0
        """Counts looks at an engine that has nothing to do."""
        self._process = psutil.Process()

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """See ReplicaService. Returns once the model is loaded."""
        if TEACHER not in roles_for(config):
            self._detail = "this run needs no teacher service"
            return
        await super().start_run(config, assignment)

    async def prepare(self, config: RunConfig) -> tuple[Process, int | Callable[[], int]]:
        """See StageReplica. Raises DataError, RpcError."""
        if wrong := ROLES[TEACHER].wrong_module(MODULE, config):
            raise FailedPrecondition(wrong)
        await asyncio.to_thread(check_vocabularies, config, TEACHER)
        teacher = config.roles.teacher
        folder = await asyncio.to_thread(resolve_model, teacher.model, setting="roles.teacher.model")
        trained = await asyncio.to_thread(resolve_model, config.model.path, weights=False)
        self._engine = engine = await self._load(folder, config)
        stage = next(stage for stage in stages_for(config) if stage.name == self.stage)
        candidates = create(config.algorithm).needs.candidates
        top_k = candidates.top_k if candidates is not None else 0
        ids_below = min(engine.vocabulary, vocab_size(trained) or engine.vocabulary)
        if top_k > ids_below:
            raise FailedPrecondition(
                f"algorithm.distill_top_k is {top_k}, but the teacher and the trained model have only {ids_below} "
                "tokens in common"
            )
        self._columns = columns = TeacherColumns(
            engine.compute_logprobs,
            prompt=TEACHER_PROMPT_TOKENS if TEACHER_PROMPT_TOKENS in stage.needs else "prompt_tokens",
            columns=stage.writes,
            top_k=top_k,
            vocabulary=engine.vocabulary,
            ids_below=ids_below,
            context=engine.context,
            max_tokens=teacher.max_tokens_in_flight,
            on_late=self._context.give_up,
        )
        loop = asyncio.get_running_loop()

        def process(delivery: Delivery, loaded: dict[str, Column]) -> "Future[Result]":
            return asyncio.run_coroutine_threadsafe(columns.of_group(delivery.group_id, loaded), loop)

        return process, columns.most_groups

    async def _load(self, folder: Path, config: RunConfig) -> ChildEngine:
        share = ROLES[TEACHER].gpu_share(config)
        gpus = await self._context.gpus.lease(ROLES[TEACHER].gpus(config), share)
        self._detail, self._loading = f"loading {folder.name}", True
        try:
            engine = await ChildEngine.start(
                folder,
                config.teacher_engine,
                environment=gpu_environment(gpus, share),
                name=self._settings.replica_id,
                log_level=self._settings.log_level,
                python=self._settings.engine_python,
                on_exit=self._on_engine_exit,
                on_tokens=self._on_look,
                frozen=True,
                for_logprobs=True,
                gpu_lease=self._context.gpus.child_lease if gpus else None,
            )
        except RpcError as error:
            message = str(error)
            for name, own in SETTINGS.items():
                message = message.replace(name, own)
            raise FailedPrecondition(message) from error
        finally:
            self._loading = False
        self._detail = ""
        logger.info("%s is loaded (process %d)", folder.name, engine.pid)
        return engine

    async def stop_run(self) -> None:
        await super().stop_run()
        engine, self._engine, self._columns, self._detail = self._engine, None, None, ""
        if engine is not None:
            await engine.stop()

    def status(self) -> ServiceStatus:
        of_groups, engine = super().status(), self._engine
        read = engine.prefilled_tokens if engine is not None else 0
        gauges = {"rss_bytes": float(self._process.memory_info().rss)}
        if engine is not None and self._columns is not None:
            gauges |= {
                "engine_rss_bytes": engine.gauges.get("engine_rss_bytes", 0.0),
                "tokens_in_flight": float(self._columns.tokens_in_flight),
                "prefilled_tokens": float(read),
            }
        loaded = loaded_mebibytes(self._process) if self._loading else 0
        return ServiceStatus(
            held_groups=of_groups.held_groups,
            done_groups=of_groups.done_groups,
            progress=of_groups.done_groups + read + self._turns + loaded,
            detail=self._detail,
            gauges=gauges,
        )

    def _on_look(self, count: int, per_second: float) -> None:
        """Count a report of an engine that has nothing to do; that of a busy one counts what it has read."""
        if self._columns is not None and not self._columns.tokens_in_flight:
            self._turns += 1

    def _on_engine_exit(self, ended: ChildExit) -> None:
        if self._loading:
            return  # start_run raises
        code = ended.exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._context.give_up(f"the teacher's engine {how}")
