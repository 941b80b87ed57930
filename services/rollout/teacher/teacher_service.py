"""The teacher as a replica: one SGLang engine with a frozen model, which works on the stage `teacher`."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from relaxd.algorithms import create
from relaxd.board import TEACHER_PROMPT_TOKENS, Column, Delivery, stages_for
from relaxd.board.worker import Process, Result
from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model
from relaxd.models.vocabulary import check_vocabularies, vocab_size
from relaxd.replica.replica_context import ReplicaContext
from relaxd.replica.service_interface import ServiceStatus
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import ROLES, TEACHER
from relaxd.rpc.errors import FailedPrecondition
from services.rollout.service.replica_engine import FrozenEngine
from services.rollout.teacher.teacher_columns import TeacherColumns

MODULE = "services.rollout.teacher"
SETTINGS = {"rollout.dtype": "trainer.dtype", "rollout.sglang": "roles.teacher.sglang"} | {
    f"rollout.{name}": f"roles.teacher.{name}" for name in ("tensor_parallel", "memory_fraction")
}
"""The engine's names for the teacher's settings."""


class TeacherService(StageReplica):
    """Asks its engine about the groups of its stage."""

    role = TEACHER
    stage = ROLES[TEACHER].stage
    max_connection_age_seconds = None  # nobody calls it but the coordinator

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self._engine = FrozenEngine(context, TEACHER, SETTINGS)
        self._columns: TeacherColumns | None = None
        self._turns = 0
        """Counter of reports of an idle engine."""

    async def prepare(self, config: RunConfig) -> tuple[Process, int | Callable[[], int]]:
        """Raises DataError, RpcError."""
        if wrong := ROLES[TEACHER].wrong_module(MODULE, config):
            raise FailedPrecondition(wrong)
        await asyncio.to_thread(check_vocabularies, config, TEACHER)
        teacher = config.roles.teacher
        folder = await asyncio.to_thread(resolve_model, teacher.model, setting="roles.teacher.model")
        trained = await asyncio.to_thread(resolve_model, config.model.path, weights=False)
        engine = await self._engine.load(
            folder, config, config.teacher_engine, on_tokens=self._on_look, for_logprobs=True
        )
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

    async def stop_run(self) -> None:
        await super().stop_run()
        self._columns = None
        await self._engine.stop()

    def status(self) -> ServiceStatus:
        of_groups, engine = super().status(), self._engine.engine
        read = engine.prefilled_tokens if engine is not None else 0
        gauges = {"rss_bytes": self._engine.rss_bytes}
        if engine is not None and self._columns is not None:
            gauges |= {
                "engine_rss_bytes": engine.gauges.get("engine_rss_bytes", 0.0),
                "tokens_in_flight": float(self._columns.tokens_in_flight),
                "prefilled_tokens": float(read),
            }
        return ServiceStatus(
            held_groups=of_groups.held_groups,
            done_groups=of_groups.done_groups,
            progress=of_groups.done_groups + read + self._turns + self._engine.loaded_mebibytes,
            detail=of_groups.detail or self._engine.detail,
            gauges=gauges,
        )

    def _on_look(self, count: int, per_second: float) -> None:
        """Count a report of an idle engine; a busy one's progress is what it has read."""
        if self._columns is not None and not self._columns.tokens_in_flight:
            self._turns += 1
