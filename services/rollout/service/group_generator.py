"""The rollout stage: generates the samples of a group from its prompt."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from relaxd.board import ROUTED_EXPERTS, Board, Column, Delivery, Drop, DropReason
from relaxd.board.worker import Result
from relaxd.config import RunConfig
from services.rollout.engines.engine import RolloutEngine
from services.rollout.engines.types import AnswerTooLarge, Output, Sampling
from services.rollout.service.occupancy import Occupancy
from services.rollout.service.requests import run_sampling

logger = logging.getLogger(__name__)


class GroupGenerator:
    """Generates the groups of one run with the service's current engine."""

    def __init__(
        self,
        config: RunConfig,
        board: Board,
        engine: Callable[[], RolloutEngine | None],
        on_progress: Callable[[], None],
        occupancy: Occupancy,
    ) -> None:
        """`on_progress` is called in the event loop whenever a sample has ended, as another group may fit."""
        self._config = config
        self._board = board
        self._engine = engine
        self._on_progress = on_progress
        self._occupancy = occupancy
        self._loop = asyncio.get_running_loop()
        self._unfinished: dict[str, int] = {}
        self._running: set[Future[Result]] = set()

    def room(self, held: int) -> int:
        """Return how many groups may be held, given that `held` are now. The engine's limit counts samples."""
        per_group = self._config.rollout.samples_per_prompt
        unfinished = list(self._unfinished.values())
        samples = sum(unfinished) + per_group * max(0, held - len(unfinished))
        free = self._config.rollout.max_running_samples - samples
        return max(held + free // per_group, 1)

    def process(self, delivery: Delivery, columns: dict[str, Column]) -> "Future[Result]":
        """Process a group. Called in the stage worker's threads."""
        prompt = columns["prompt_tokens"]
        assert isinstance(prompt, np.ndarray)
        tokens = tuple(map(int, prompt))
        example = columns.get("prompt")  # only in runs whose sources have sampling parameters
        own = example.get("sampling") if isinstance(example, dict) else None
        future = asyncio.run_coroutine_threadsafe(self._generate(delivery, tokens, own), self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def cancel(self) -> None:
        """Cancel the running groups, which were handed back."""
        for future in list(self._running):
            future.cancel()

    async def _generate(
        self, delivery: Delivery, prompt: tuple[int, ...], own: Mapping[str, int | float] | None
    ) -> Result:
        n = self._config.rollout.samples_per_prompt
        sampling = run_sampling(self._config.rollout, group_seed(self._config.run.seed, delivery.group_id), own)
        try:
            while True:
                engine = self._engine()
                weights = engine.weights if engine is not None else None
                if engine is None or weights is None:
                    raise asyncio.CancelledError  # taken just before the engine ended: handed back, uncounted
                if not prompt or max(prompt) >= engine.vocabulary or min(prompt) < 0:
                    return Drop(DropReason.BAD_PROMPT)
                if engine.context and len(prompt) + sampling.max_new_tokens > engine.context:
                    return Drop(DropReason.PROMPT_TOO_LONG)
                # The engine may start with later weights. The board then has too early a version, which only delays a
                # step more than needed.
                if not await asyncio.to_thread(self._board.begin, delivery, weights.version):
                    raise asyncio.CancelledError  # another replica has it
                self._unfinished[delivery.group_id] = n
                try:
                    samples = await self._generate_samples(engine, delivery.group_id, prompt, sampling)
                except AnswerTooLarge as error:
                    logger.error("dropping group %s: %s", delivery.group_id, error)
                    return Drop(DropReason.TOO_LARGE)
                # After a pause in mode "abort", start again under the next weights.
                if all(sample.finish_reason != "abort" for sample in samples):
                    return group_columns(samples, routed_experts=self._config.rollout.return_routed_experts)
        finally:
            self._unfinished.pop(delivery.group_id, None)

    async def _generate_samples(
        self, engine: RolloutEngine, group_id: str, prompt: tuple[int, ...], sampling: Sampling
    ) -> list[Output]:
        n = self._config.rollout.samples_per_prompt
        samples: dict[int, Output] = {}
        with self._occupancy.working():
            async for output in engine.generate(prompt, n, sampling):
                samples[output.sample] = output
                self._unfinished[group_id] = n - len(samples)
                self._on_progress()
        return [samples[index] for index in range(n)]


def group_seed(run_seed: int, group_id: str) -> int:
    """Return the seed of a group's samples. It depends only on run seed and group id."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def group_columns(samples: Sequence[Output], *, routed_experts: bool = False) -> dict[str, Column]:
    """Return the columns that the stage writes, from the n complete samples of a group.

    Raises ValueError when `routed_experts` is set and a sample has none.
    """
    columns: dict[str, Column] = {}
    if routed_experts:
        found = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
        if len(found) < len(samples):
            raise ValueError("rollout.return_routed_experts is true, but the engine returned none")
        columns[ROUTED_EXPERTS] = np.concatenate(found)
    tokens = np.concatenate([np.asarray(sample.tokens, dtype=np.int32) for sample in samples])
    return columns | {
        "tokens": tokens,
        "sample_of_sequence": np.arange(len(samples), dtype=np.int32),
        "lengths": np.array([len(sample.tokens) for sample in samples], dtype=np.int32),
        "shares_prompt": np.ones(len(samples), dtype=np.uint8),
        "loss_mask": np.ones(len(tokens), dtype=np.uint8),
        "rollout_logprobs": np.concatenate([np.asarray(sample.logprobs, dtype=np.float32) for sample in samples]),
        "versions": np.concatenate([np.asarray(sample.versions, dtype=np.int64) for sample in samples]),
        "finish": [sample.finish_reason for sample in samples],
        "text": [sample.text for sample in samples],
        "spans_weight_update": np.array([sample.spans_weight_update for sample in samples], dtype=np.uint8),
    }
