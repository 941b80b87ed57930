"""Scores samples with a service at reward.address."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Protocol

from relaxd.config import RewardConfig
from relaxd.retry import Backoff
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.waiting import duration, waiting
from services.reward.pool import Failure
from services.reward.remote.breaker import Breaker
from services.reward.remote.errors import MismatchError, UnreachableError
from services.reward.remote.grpc_client import GrpcClient
from services.reward.remote.http_client import HttpClient
from services.reward.slow import slow_after

ATTEMPTS = 10
"""Attempts for the same samples: an answer may be what crashes the service."""
PAUSE = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Pauses between them, to which up to a half is added at random."""


class Client(Protocol):
    """Speaks to a service."""

    calls_per_sample: bool
    """Whether `score` takes one sample, not several of one prompt."""

    async def probe(self) -> None:
        """Ask whether the service works. Raises UnreachableError, MismatchError."""

    async def score(self, samples: Sequence[RewardInput], seconds: float) -> list[RewardOutput | Failure]:
        """Score samples of one prompt within `seconds`. Raises UnreachableError, MismatchError."""

    async def close(self) -> None:
        """Close its connections."""


class RemoteScorer:
    """Calls a reward service: limits the calls in flight, repeats those that don't reach it, waits while it is down."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._client: Client = HttpClient(config) if "://" in config.address else GrpcClient(config)
        self._breaker = Breaker(config.address, self._client.probe)
        self._room = asyncio.Semaphore(config.max_in_flight)
        self._open_calls: dict[int, float] = {}
        self._calls = 0
        self._scored = 0

    @property
    def pieces(self) -> int:
        """A counter of samples and probes, which shows that the replica isn't stuck."""
        return self._scored + self._breaker.probes

    @property
    def detail(self) -> str:
        """What takes long, in one sentence; empty if nothing does."""
        if problem := self._breaker.problem:
            return problem
        seconds = time.monotonic() - min(self._open_calls.values(), default=time.monotonic())
        if seconds <= slow_after(self._config.timeout_seconds):
            return ""
        count = len(self._open_calls)
        return f"the reward service at {self._config.address} has {count} open calls, one for {duration(seconds)}"

    async def check(self) -> None:
        """Ask whether the service works. Raises UnreachableError, MismatchError."""
        await self._client.probe()

    async def start(self) -> None:
        """Begin with a service that may be away for now. Raises MismatchError: it isn't one of these rewards."""
        try:
            await self.check()
        except UnreachableError as error:
            self._breaker.open(error)

    def forgive(self) -> None:
        """Count reward.outage_seconds of a service that is away from now on."""
        self._breaker.forgive()

    async def score(self, samples: Sequence[RewardInput]) -> list[RewardOutput | Failure]:
        """Score samples of one prompt; the outcomes are in their order. Cancelling this cancels its calls."""
        asked = [[sample] for sample in samples] if self._client.calls_per_sample else [list(samples)]
        tasks = [asyncio.create_task(self._score(some)) for some in asked]
        try:
            outcomes = [outcome for some in await asyncio.gather(*tasks) for outcome in some]
        finally:
            for task in tasks:
                task.cancel()
        self._scored += len(samples)
        return outcomes

    async def close(self) -> None:
        """End its calls."""
        self._breaker.close()
        await self._client.close()

    async def _score(self, samples: list[RewardInput]) -> list[RewardOutput | Failure]:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                await self._breaker.wait_closed(self._config.outage_seconds)
                try:
                    outcomes = await self._call(samples)
                    self._breaker.succeeded()
                    return outcomes
                except UnreachableError as error:
                    self._breaker.failed(error)
                    if attempt == ATTEMPTS:
                        raise UnreachableError(
                            f"the reward service at {self._config.address} can't be reached: {error} ({ATTEMPTS} tries)"
                        ) from error
                with waiting("the next try to reach the reward service", on=self._config.address):
                    await asyncio.sleep(PAUSE.pause(attempt) * (1 + random.random() / 2))
        except (UnreachableError, MismatchError) as error:
            return [Failure(str(error))] * len(samples)
        raise AssertionError("the last attempt returns or raises")

    async def _call(self, samples: list[RewardInput]) -> list[RewardOutput | Failure]:
        async with self._room:
            self._calls += 1
            number = self._calls
            self._open_calls[number] = time.monotonic()
            try:
                return await self._client.score(samples, self._config.timeout_seconds)
            finally:
                del self._open_calls[number]
