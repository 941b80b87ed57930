"""`python -m services.rollout.teacher`: the teacher as an SGLang engine.

A frozen model prefills answers and returns the log-probs of their tokens. Used in runs with roles.teacher.engine =
"sglang"; `services.trainer.teacher` runs the teacher in Megatron ranks. Both write the same columns.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import create
from relaxd.board import (
    CANDIDATES,
    TEACHER_CANDIDATE_LOGPROBS,
    TEACHER_LOGPROBS,
    TEACHER_PROMPT_TOKENS,
    Column,
    Delivery,
    Drop,
    DropReason,
    GroupSequence,
    read_sequences,
    stages_for,
)
from relaxd.board.worker import Process, Result
from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model
from relaxd.models.vocabulary import check_vocabularies, vocab_size
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, ServiceStatus, open_context
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import ROLES, TEACHER
from relaxd.rpc.errors import DeadlineExceeded, FailedPrecondition
from relaxd.rpc.service_settings import parse_settings
from services.rollout.engines.request_types import RequestFailed
from services.rollout.service.child_engine import GivenLogprobs
from services.rollout.service.replica_engine import FrozenEngine

logger = logging.getLogger(__name__)


class TokenBudget:
    """Admits requests in order of arrival while their tokens fit. A request above the maximum runs alone."""

    def __init__(self, most: int) -> None:
        """`most`: maximum total number of tokens of the admitted requests."""
        self._most = most
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()
        self.used = 0
        """Total number of tokens of the admitted requests."""

    @asynccontextmanager
    async def hold(self, tokens: int) -> AsyncIterator[None]:
        """Wait until a request with `tokens` tokens fits, and count its tokens while the block runs."""
        async with self._turn, self._freed:  # in turns, or a large request would wait for ever
            while self.used and self.used + tokens > self._most:
                await self._freed.wait()  # brief: the deadlines of the requests that were admitted
            self.used += tokens
        try:
            yield
        finally:
            self.used -= tokens
            async with self._freed:
                self._freed.notify_all()


SHARED_PROMPT_TOKENS = 64
"""Minimum prompt length for running a group's first sequence alone, to cache the prompt in the engine; in tokens."""
REQUEST_SECONDS = 120.0
"""Constant part of a request's deadline, in seconds; time for the tokens in flight is added."""
TOKENS_PER_SECOND = 100.0
"""Minimum speed of an engine, in tokens per second, by which deadlines are set; a slower engine counts as failed."""
LEAST_GROUPS = 2
"""Minimum of `most_groups`, the number of groups that a replica may hold."""
MOST_GROUPS = 256
"""Maximum of `most_groups`, the number of groups that a replica may hold."""

Compute = Callable[[NDArray[np.integer], int, int, float], Awaitable[GivenLogprobs]]
"""Type of `ChildEngine.compute_logprobs`."""


class _Refused(Exception):
    """Raised for a group that the teacher can't score; it is dropped for `reason`."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TeacherColumns:
    """Computes the teacher's columns of groups with an engine. Not thread-safe: use it in one event loop."""

    def __init__(
        self,
        compute: Compute,
        *,
        prompt: str,
        columns: Collection[str],
        top_k: int,
        vocabulary: int,
        ids_below: int,
        context: int,
        max_tokens: int,
        on_late: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Set how columns are computed.

        Args:
            compute: computes the log-probs of one sequence with the engine.
            prompt: name of the column with the teacher's prompt.
            columns: names of the columns to compute.
            top_k: number of candidates per token, if `columns` has candidates.
            vocabulary: size of the teacher's vocabulary. Groups with other tokens are dropped.
            ids_below: limit of candidates' ids: smaller ids exist in the student's vocabulary too.
            context: maximum tokens of a sequence, 0 if unlimited. Groups with longer sequences are dropped.
            max_tokens: maximum tokens in flight in the engine.
            on_late: called with the reason if the engine doesn't answer in time.
        """
        self._compute = compute
        self._prompt = prompt
        self._wanted = tuple(columns)
        self._top_k = top_k if CANDIDATES in self._wanted else 0
        self._vocabulary, self._ids_below, self._context = vocabulary, ids_below, context
        self._max_tokens = max_tokens
        self._budget = TokenBudget(max_tokens)
        self._group_tokens = 0.0
        """Moving average of the number of tokens per group."""
        self._on_late = on_late

    @property
    def tokens_in_flight(self) -> int:
        """Number of tokens in the requests that the engine is processing."""
        return self._budget.used

    def most_groups(self) -> int:
        """Return the maximum number of groups that the replica may hold: twice what fits into the engine, but at least
        LEAST_GROUPS and at most MOST_GROUPS. Other replicas get the rest."""
        if not self._group_tokens:
            return LEAST_GROUPS
        return min(MOST_GROUPS, max(LEAST_GROUPS, round(2 * self._max_tokens / self._group_tokens)))

    async def of_group(self, group_id: str, columns: Mapping[str, Column]) -> Result:
        """Return the teacher's columns of a group, or a drop with the reason. Raises the engine's errors.

        For tokens with loss_mask 0, values are 0 and candidates -1.
        """
        try:
            try:
                sequences = read_sequences(columns, self._prompt)
            except ValueError as error:
                raise _Refused(DropReason.MALFORMED, str(error)) from error
            for number, one in enumerate(sequences):
                self._check(number, one)
            tokens = sum(len(one.prompt) + len(one.tokens) for one in sequences)
            self._group_tokens = 0.9 * (self._group_tokens or tokens) + 0.1 * tokens
            found = await self._ask(sequences)
        except _Refused as refused:
            logger.error("group %s is dropped: %s", group_id, refused)
            return Drop(refused.reason, detail=str(refused))
        return {name: np.concatenate([each[name] for each in found]) for name in self._wanted}

    def _check(self, number: int, one: GroupSequence) -> None:
        largest = int(max(one.prompt.max(initial=0), one.tokens.max(initial=0)))
        if largest >= self._vocabulary:
            raise _Refused(
                DropReason.NO_LOGPROBS,
                f"it has token {largest}, but the teacher has only {self._vocabulary} tokens",
            )
        length = len(one.prompt) + len(one.tokens)
        if self._context and length > self._context:
            raise _Refused(
                DropReason.TOO_LONG,
                f"a sequence has {length} tokens with its prompt, but the teacher's engine takes at most "
                f"{self._context}: choose a teacher with a longer context, give its key-value cache more memory, or "
                "limit prompts and answers to fewer tokens",
            )
        if not len(one.prompt) and len(one.tokens) and one.loss_mask[0]:
            raise _Refused(
                DropReason.MALFORMED,
                f"sequence {number} begins with a token that is trained on, but nothing predicts a first token",
            )

    async def _ask(self, sequences: list[GroupSequence]) -> list[dict[str, NDArray[Any]]]:
        """Compute the columns of all sequences concurrently. A long prompt is first cached with the first sequence."""
        if len(sequences) > 1 and len(sequences[0].prompt) >= SHARED_PROMPT_TOKENS:
            return [await self._of_sequence(sequences[0]), *await self._side_by_side(sequences[1:])]
        return await self._side_by_side(sequences)

    async def _side_by_side(self, sequences: list[GroupSequence]) -> list[dict[str, NDArray[Any]]]:
        tasks = [asyncio.create_task(self._of_sequence(one)) for one in sequences]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error of one task
                task.cancel()

    async def _of_sequence(self, one: GroupSequence) -> dict[str, NDArray[Any]]:
        """Compute a sequence's columns with the engine, for its tokens without the prompt."""
        asked = np.flatnonzero(one.loss_mask)
        found: dict[str, NDArray[Any]] = {
            TEACHER_LOGPROBS: np.zeros(len(one.tokens), np.float32),
            CANDIDATES: np.full((len(one.tokens), self._top_k), -1, np.int32),
            TEACHER_CANDIDATE_LOGPROBS: np.zeros((len(one.tokens), self._top_k), np.float32),
        }
        if not asked.size:
            return found
        first, end = int(asked[0]), int(asked[-1]) + 1
        whole = np.concatenate([one.prompt, one.tokens[:end]])
        logprobs, ids, values = await self._ask_engine(whole, len(one.prompt) + first)
        if len(logprobs) != end - first:
            raise _Refused(
                DropReason.MALFORMED,
                f"the teacher's engine gives {len(logprobs)} log-probs for {end - first} tokens of an answer",
            )
        places = asked - first
        logprobs, ids, values = logprobs[places], ids[places], values[places]
        finite = np.isfinite(logprobs) & np.isfinite(values).all(-1)
        if not finite.all():
            raise _Refused(
                DropReason.NO_LOGPROBS,
                f"the teacher gives {np.count_nonzero(~finite)} of {len(asked)} tokens of an answer a log-prob that "
                "isn't finite",
            )
        known = ids < self._ids_below
        found[TEACHER_LOGPROBS][asked] = logprobs
        found[CANDIDATES][asked] = np.where(known, ids, np.int32(-1))
        found[TEACHER_CANDIDATE_LOGPROBS][asked] = np.where(known, values, np.float32(0))
        return found

    async def _ask_engine(self, tokens: NDArray[np.integer], start: int) -> GivenLogprobs:
        async with self._budget.hold(len(tokens)):
            seconds = REQUEST_SECONDS + self._budget.used / TOKENS_PER_SECOND
            try:
                return await self._compute(tokens, start, self._top_k, seconds)
            except RequestFailed as error:
                raise _Refused(DropReason.NO_LOGPROBS, f"the teacher's engine failed: {error}") from error
            except DeadlineExceeded:
                self._on_late(
                    f"the teacher's engine didn't answer within {seconds:.0f} s, with {self._budget.used} tokens in "
                    "flight"
                )
                raise


MODULE = "services.rollout.teacher"
SETTINGS = {"rollout.dtype": "trainer.dtype", "rollout.sglang": "roles.teacher.sglang"} | {
    f"rollout.{name}": f"roles.teacher.{name}" for name in ("tensor_parallel", "memory_fraction")
}
"""Names of engine settings, mapped to the teacher's names, which replace them in error messages."""


class TeacherService(StageReplica):
    """Teacher replica: computes the columns of the teacher's stage with an SGLang engine."""

    role = TEACHER
    stage = ROLES[TEACHER].stage
    max_connection_age_seconds = None  # nobody calls it but the coordinator

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self._engine = FrozenEngine(context, TEACHER, SETTINGS)
        self._columns: TeacherColumns | None = None
        self._turns = 0
        """Number of token reports that the idle engine has sent; part of the replica's progress."""

    async def prepare(self, config: RunConfig) -> tuple[Process, int | Callable[[], int]]:
        """Load the teacher's model. Returns the function that processes a group, and the function `most_groups`.

        Raises DataError, RpcError.
        """
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
        """Count an idle engine's report as progress. A busy engine's progress is its number of prefilled tokens."""
        if self._columns is not None and not self._columns.tokens_in_flight:
            self._turns += 1


async def main() -> None:
    """Run the teacher service until it is stopped."""
    async with open_context(parse_settings(TEACHER)) as context:
        await run_replica(TeacherService(context), context)


if __name__ == "__main__":
    asyncio.run(main())
