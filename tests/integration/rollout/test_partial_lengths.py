"""Drained, dead and hanging engines don't make answers shorter: what is trained is as long as what was published."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from relaxd.board import Board, NewGroup, StageWorker, stages_for
from relaxd.config import RunConfig
from services.rollout.engines.engine_interface import RolloutEngine
from services.rollout.engines.request_types import Output, Request, Version
from services.rollout.service.answers import KeptAnswers
from services.rollout.service.group_generator import GroupGenerator, Occupancy
from tests.unit.rollout.configs import run_config

END = 1 / 40
"""Probability of each token to be an answer's last one: lengths are geometric."""
TOKEN_SECONDS = 0.005
SAMPLES, GROUPS, MOST = 4, 300, 2000
TROUBLE_TICKS = 30
"""Ticks of the clock between two replicas that go."""
BOUND = 2.7 / (SAMPLES * GROUPS) ** 0.5
"""Kolmogorov-Smirnov distance that one of a million samples of the right distribution exceeds."""


class Clock:
    """Gives the time of engines and trouble. It stands still while answers are saved.

    What an engine that hangs loses is what it generated since the last save. A busy machine must not make that more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._saving = 0
        self._tick = asyncio.Event()
        save = KeptAnswers._save

        async def counted(kept: KeptAnswers) -> None:
            self._saving += 1
            try:
                await save(kept)
            finally:
                self._saving -= 1

        monkeypatch.setattr(KeptAnswers, "_save", counted)
        self._ticking = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TOKEN_SECONDS)
            if not self._saving:
                self._tick.set()
                self._tick = asyncio.Event()

    async def ticks(self, count: int = 1) -> None:
        """Wait for that many ticks."""
        for _ in range(count):
            await self._tick.wait()

    def stop(self) -> None:
        self._ticking.cancel()


class CoinEngine(RolloutEngine):
    """Throws a coin after each token. Nothing but its tokens says how far an answer is."""

    vocabulary, context, device = 1000, 0, "cpu"

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.weights = Version(1, 0)
        self.hangs = False
        self._rng = rng
        self._aborted: set[str] = set()

    @property
    def tokens(self) -> int:
        return 0

    @property
    def alive(self) -> bool:
        return True

    async def _generate(self, request: Request) -> AsyncIterator[Output]:
        lengths = {sample: len(request.tokens_of(sample)) for sample in request.samples}
        while lengths:
            await self._clock.ticks()
            if self.hangs:
                await asyncio.Event().wait()
            if request.request_id in self._aborted:
                for sample in lengths:
                    yield Output(sample, finish_reason="abort")
                return
            for sample in list(lengths):
                output = Output(sample, [lengths[sample]], [-1.0], [0])
                lengths[sample] += 1
                if self._rng.random() < END or lengths[sample] == MOST:
                    output.finish_reason = "length" if lengths[sample] == MOST else "stop"
                    del lengths[sample]
                yield output

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def pause(self, *arguments: Any) -> int:
        raise NotImplementedError

    async def _continue(self, weights: Any) -> None: ...

    async def join(self, request: Any) -> None: ...

    async def receive(self, request: Any) -> Any: ...

    async def leave(self, group_name: str) -> bool:
        return False

    async def stop(self) -> None: ...


class Replica:
    """Stage worker, generator and engine, as the service has them."""

    def __init__(self, url: str, config: RunConfig, name: str, rng: random.Random, clock: Clock) -> None:
        self.name = name
        self.board = Board(url, "run", stages_for(config), config.board)
        self.engine = CoinEngine(rng, clock)
        self.generator = GroupGenerator(
            config,
            self.board,
            lambda: self.engine,
            lambda: self.worker.resume(),
            Occupancy(),
            lambda group: self.worker.hold(group),
        )
        self.worker = StageWorker(
            self.board,
            "rollout",
            name,
            self.generator.process,
            concurrency=lambda: self.generator.room(self.worker.held),
        )
        self.worker.start()

    async def drain(self) -> None:
        """As RolloutService.drain."""
        self.worker.pause()
        await self.generator.cut_off()
        await asyncio.to_thread(self.worker.drain, 0.1)
        self.generator.cancel()

    async def hang(self) -> None:
        """Stop in the middle of everything, and be taken for dead."""
        self.engine.hangs = True
        self.worker.pause()
        await asyncio.to_thread(self.board.reclaim, term=1, consumer=self.name)
        await asyncio.to_thread(self.worker.stop)
        self.generator.cancel()


async def lengths_after_trouble(url: str, clock: Clock, *, partial: bool) -> "np.ndarray[Any, Any]":
    """The lengths of all answers of a run in which replicas come and go."""
    kept = {"enabled": True, "save_seconds": 0.01, "save_tokens": 4} if partial else {}
    config = run_config(samples_per_prompt=SAMPLES, max_new_tokens=MOST, max_running_samples=80, partial=kept)
    # On a busy machine a group may meet five replicas that hang before it has a token. That isn't what is asked here.
    config = config.model_copy(update={"board": config.board.model_copy(update={"max_deliveries": 1000})})
    board = Board(url, "run", stages_for(config), config.board)
    board.create(term=1, groups_per_step=GROUPS, steps=1)
    board.set_gate(term=1, oldest_version=0, open=True)
    columns = {"prompt_tokens": np.array([5, 6], np.int32), "prompt": {"text": "?"}}
    board.publish(term=1, groups=[NewGroup(f"g{number}", columns) for number in range(GROUPS)])
    # A replica that goes takes a thread for half a second; others must not wait for one meanwhile.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
    rng, number = random.Random(8), 2
    found: dict[str, Any] = {}
    replicas = [Replica(url, config, f"replica-{index}", rng, clock) for index in range(2)]
    going: list[asyncio.Task[None]] = []
    for _ in range(400):
        await clock.ticks(TROUBLE_TICKS)
        if not (partial or number < 30):
            break  # without it, an endless story: what is done by now is all that is looked at
        deliveries = await asyncio.to_thread(board.take, "reward", "tester", count=GROUPS, block_seconds=0.0)
        columns_of = board.load(deliveries, ["lengths"])
        found |= {delivery.group_id: each for delivery, each in zip(deliveries, columns_of, strict=True) if each}
        if len(found) == GROUPS:
            break
        gone = replicas.pop(0)
        going.append(asyncio.create_task(gone.hang() if number % 5 == 0 else gone.drain()))
        replicas.append(Replica(url, config, f"replica-{number}", rng, clock))
        number += 1
    await asyncio.gather(*going, *(replica.drain() for replica in replicas))
    clock.stop()
    assert number > 10
    assert board.counts().dropped == 0
    lengths = np.concatenate([np.asarray(each["lengths"]) for each in found.values()])
    board.delete()
    return lengths


def distance(lengths: "np.ndarray[Any, Any]") -> float:
    """Kolmogorov-Smirnov distance from the geometric distribution."""
    counts = np.arange(1, MOST + 1)
    empirical = np.searchsorted(np.sort(lengths), counts, side="right") / len(lengths)
    return float(np.abs(empirical - (1 - (1 - END) ** counts)).max())


@pytest.mark.night
@pytest.mark.timeout(600)
async def test_lengths_are_those_of_a_run_without_trouble(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = await lengths_after_trouble(redis_url, Clock(monkeypatch), partial=True)
    assert len(lengths) == SAMPLES * GROUPS
    print(f"distance {distance(lengths):.3f}, bound {BOUND:.3f}, mean {lengths.mean():.1f}, expected {1 / END:g}")
    assert distance(lengths) < BOUND


@pytest.mark.night
@pytest.mark.timeout(600)
async def test_without_partial_rollout_the_same_trouble_favours_short_answers(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the test above can fail."""
    lengths = await lengths_after_trouble(redis_url, Clock(monkeypatch), partial=False)
    print(f"distance {distance(lengths):.3f}, bound {BOUND:.3f}, mean {lengths.mean():.1f}, expected {1 / END:g}")
    assert distance(lengths) > BOUND
