"""The rollout stage: generates the samples of a group from its prompt, and counts the engine's busy time."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxd.algorithms import create
from relaxd.board import STUDENT_CANDIDATES, Board, BoardUnavailable, Column, Delivery, Drop, DropReason
from relaxd.board.worker import Result
from relaxd.config import RunConfig
from relaxd.media.prompt_media import PromptMedia
from relaxd.seeds import seed_of
from relaxd.waiting import waiting
from services.rollout.engines.engine_interface import RolloutEngine
from services.rollout.engines.request_types import AnswerTooLarge, Sampling, run_sampling
from services.rollout.service.answers import Answers, KeptAnswers

logger = logging.getLogger(__name__)

GAUGES = ("engine_busy_seconds", "engine_paused_seconds", "engine_state")


class Occupancy:
    """Counts the seconds that the engine was busy or paused since the process started. Use it in one event loop.

    An engine is busy while it has at least one request and is not paused; otherwise it is paused or idle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.requests = 0
        """Number of requests that the engine is running."""
        self._paused_until: float | None = None
        self._busy = self._paused = 0.0
        self._since = clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one more running request while the block runs."""
        self._count()
        self.requests += 1
        try:
            yield
        finally:
            self._count()
            self.requests -= 1

    def pause(self, lease_seconds: float) -> None:
        """Count time as paused from now until `resume` is called, or for at most `lease_seconds`."""
        self._count()
        self._paused_until = self._clock() + lease_seconds

    def resume(self) -> None:
        """Stop counting time as paused."""
        self._count()
        self._paused_until = None

    @property
    def is_paused(self) -> bool:
        """True if the engine is paused and the pause's lease hasn't expired."""
        self._count()
        return self._paused_until is not None

    def gauges(self) -> dict[str, float]:
        """Return engine_busy_seconds and engine_paused_seconds so far, and engine_state: 0 idle, 1 busy, 2 paused."""
        state = 2.0 if self.is_paused else 1.0 if self.requests else 0.0
        return dict(zip(GAUGES, (self._busy, self._paused, state), strict=True))

    def _count(self) -> None:
        """Add the time since the last call of this method to the busy or paused seconds."""
        now = self._clock()
        if self._paused_until is not None:
            end = min(now, self._paused_until)
            self._paused += max(0.0, end - self._since)
            self._since = max(self._since, end)
            if now >= self._paused_until:
                self._paused_until = None
        if self.requests and self._paused_until is None:
            self._busy += now - self._since
        self._since = now


CUT_SECONDS = 2.0
"""Maximum time for an engine to end aborted requests, in seconds. Later tokens are not saved on the board."""
KEEP_SECONDS = 15.0
"""Maximum time for saving unfinished answers on the board, in seconds. One attempt may take Board.retry_seconds."""
PAUSE_POLL_SECONDS = 0.02
"""Interval between checks whether the engine's pause has ended, in seconds."""
REPORTS_PER_SAVE = 8
"""Number of reports of a sample's new tokens before a save, which is due after rollout.partial.save_tokens tokens."""


@dataclass(frozen=True)
class Asked:
    """Prompt of a group to generate, with the sampling parameters of the prompt's source."""

    prompt: tuple[int, ...]
    media: PromptMedia
    """Images, videos and sounds of the prompt."""
    sampling: Mapping[str, Any] | None
    """Sampling parameters that the prompt's source sets instead of the run's; None if it sets none."""


class GroupGenerator:
    """Generates the samples of a run's groups with the service's current engine."""

    def __init__(
        self,
        config: RunConfig,
        board: Board,
        engine: Callable[[], RolloutEngine | None],
        on_progress: Callable[[], None],
        occupancy: Occupancy,
        hold: Callable[[str], Delivery | None],
    ) -> None:
        """`on_progress`: called in the event loop when a sample has ended, because another group may fit then.

        `hold`: function that returns the newest delivery of a group that the stage worker holds, or None.
        """
        self._config = config
        self._partial = config.rollout.partial
        self._board = board
        self._writes = board.writes("rollout")
        candidates = create(config.algorithm).needs.candidates
        self._likeliest = candidates.top_k if candidates is not None and STUDENT_CANDIDATES in self._writes else 0
        """Number of likeliest tokens that the engine returns per position, for the column of candidates; 0 for none."""
        self._engine = engine
        self._on_progress = on_progress
        self._occupancy = occupancy
        self._hold = hold
        self._loop = asyncio.get_running_loop()
        self._unfinished: dict[str, int] = {}
        self._running: set[Future[Result]] = set()
        self._tasks: set[asyncio.Task[Result]] = set()
        self._requests: dict[str, RolloutEngine] = {}
        """Engines of the running requests, by the requests' ids."""
        self._numbers = itertools.count()
        self._cut_off = False

    def room(self, held: int) -> int:
        """Return the maximum number of groups to hold, by the engine's free samples. `held`: number of groups held."""
        if self._cut_off:
            return held
        per_group = self._config.rollout.samples_per_prompt
        unfinished = list(self._unfinished.values())
        samples = sum(unfinished) + per_group * max(0, held - len(unfinished))
        free = self._config.rollout.max_running_samples - samples
        return max(held + free // per_group, 1)

    def process(self, delivery: Delivery, columns: dict[str, Column]) -> "Future[Result]":
        """Start to generate a group's samples, and return the future result. Called in the stage worker's threads."""
        prompt = columns["prompt_tokens"]
        assert isinstance(prompt, np.ndarray)
        tokens = tuple(map(int, prompt))
        example = columns.get("prompt")  # only in runs whose sources have sampling parameters
        own = example.get("sampling") if isinstance(example, dict) else None
        asked = Asked(tokens, PromptMedia.of_columns(columns), own)
        future = asyncio.run_coroutine_threadsafe(self._generate(delivery, asked), self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def cancel(self) -> None:
        """Stop generating all groups. Call this after the groups were handed back."""
        for future in list(self._running):
            future.cancel()

    async def cut_off(self) -> None:
        """Stop generating all groups, save their answers on the board, and accept no more groups.

        The stage worker hands the groups back. Does nothing without rollout.partial.enabled.
        """
        if not self._partial.enabled:
            return
        self._cut_off = True
        tasks = set(self._tasks)
        if not tasks:
            return
        logger.info("keeping the unfinished answers of %d groups for other replicas", len(tasks))
        for request_id, engine in list(self._requests.items()):
            if engine.alive:
                await engine.abort(request_id)
        with waiting(f"{len(tasks)} groups that are cut off, to keep their answers"):
            _, late = await asyncio.wait(tasks, timeout=CUT_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=KEEP_SECONDS)

    async def _generate(self, delivery: Delivery, asked: Asked) -> Result:
        """Generate a group's samples, and return their columns. Raises CancelledError to hand the group back."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        kept = KeptAnswers(self._config, self._board, delivery, self._hold)
        try:
            await kept.load()
            async with kept.saving():
                return await self._answer(delivery, asked, kept)
        except BoardUnavailable as error:
            raise asyncio.CancelledError from error  # not the group's fault: handed back, uncounted
        finally:
            self._tasks.discard(task)
            self._unfinished.pop(delivery.group_id, None)

    async def _answer(self, delivery: Delivery, asked: Asked, kept: KeptAnswers) -> Result:
        prompt = asked.prompt
        sampling = run_sampling(self._config.rollout, seed_of(self._config.run.seed, delivery.group_id), asked.sampling)
        while not kept.answers.ended:
            if kept.answers.tokens:
                await self._pause_over()
            engine = self._engine()
            weights = engine.weights if engine is not None else None
            if engine is None or weights is None or self._cut_off:
                raise asyncio.CancelledError  # taken just before the engine ended: handed back, uncounted
            if not prompt or max(prompt) >= engine.vocabulary or min(prompt) < 0:
                return Drop(DropReason.BAD_PROMPT)
            if engine.context and len(prompt) + sampling.max_new_tokens > engine.context:
                return Drop(DropReason.PROMPT_TOO_LONG)
            # The engine may start with later weights. Then the board has too old a version, which only delays a step
            # more than necessary.
            oldest = await kept.go_on(weights.version)
            if not await asyncio.to_thread(self._board.begin, delivery, oldest):
                raise asyncio.CancelledError  # another replica has it
            if self._cut_off:
                continue
            try:
                await self._generate_samples(engine, delivery.group_id, asked, sampling, kept.answers)
            except AnswerTooLarge as error:
                logger.error("dropping group %s: %s", delivery.group_id, error)
                return Drop(DropReason.TOO_LARGE)
            # After a pause in mode "abort", go on under the next weights.
        return kept.answers.columns(self._writes)

    async def _pause_over(self) -> None:
        """Wait until the engine is not paused, because only then the weights that continue answers are known."""
        if not self._occupancy.is_paused:
            return
        with waiting("the engine's pause to end, because the weights after it continue unfinished answers"):
            while self._occupancy.is_paused and not self._cut_off and self._engine() is not None:
                await asyncio.sleep(PAUSE_POLL_SECONDS)

    async def _generate_samples(
        self, engine: RolloutEngine, group_id: str, asked: Asked, sampling: Sampling, answers: Answers
    ) -> None:
        """Add the engine's outputs to the answers, until the engine's request has ended."""
        partial = self._partial
        request_id = f"group-{next(self._numbers)}"
        self._unfinished[group_id] = answers.unfinished
        self._requests[request_id] = engine
        outputs = engine.generate(
            asked.prompt,
            self._config.rollout.samples_per_prompt,
            sampling,
            stream=partial.enabled,
            report_every=max(1, partial.save_tokens // REPORTS_PER_SAVE),
            begun=answers.begun,
            request_id=request_id,
            likeliest=self._likeliest,
            media=asked.media,
        )
        try:
            with self._occupancy.working():
                async for output in outputs:
                    answers.take(output)
                    if output.finish_reason is not None:
                        self._unfinished[group_id] -= 1
                        self._on_progress()
        finally:
            del self._requests[request_id]
