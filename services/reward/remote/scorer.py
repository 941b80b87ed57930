"""Scores samples with a service at reward.address."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from services.reward.pool import Failure
from services.reward.remote.errors import MismatchError, UnreachableError
from services.reward.remote.grpc_client import GrpcClient
from services.reward.remote.patience import PatientCaller


class Client(Protocol):
    """Speaks to a service."""

    calls_per_sample: bool
    """True if `score` takes one sample, not several of one prompt."""

    async def probe(self) -> None:
        """Ask whether the service works. Raises UnreachableError, MismatchError."""

    async def score(self, samples: Sequence[RewardInput], seconds: float) -> list[RewardOutput | Failure]:
        """Score samples of one prompt within `seconds`. Raises UnreachableError, MismatchError."""

    async def close(self) -> None:
        """Close its connections."""


def _client(config: RewardConfig) -> Client:
    if "://" not in config.address:
        return GrpcClient(config)
    from services.reward.remote.http_client import HttpClient  # most runs need no HTTP: 0.15 s

    return HttpClient(config)


class RemoteScorer:
    """Calls a reward service: limits the calls in flight, repeats those that don't reach it, waits while it is down."""

    def __init__(self, config: RewardConfig) -> None:
        self._timeout_seconds = config.timeout_seconds
        self._client = _client(config)
        self._caller = PatientCaller(
            f"the reward service at {config.address}",
            config.address,
            self._client.probe,
            max_in_flight=config.max_in_flight,
            timeout_seconds=config.timeout_seconds,
            outage_seconds=config.outage_seconds,
        )
        self._scored = 0

    @property
    def pieces(self) -> int:
        """A counter of samples, probes and looks, which shows that the replica isn't stuck."""
        return self._scored + self._caller.pieces

    @property
    def detail(self) -> str:
        """Call that takes long, in one sentence; empty if none does."""
        return self._caller.detail

    async def check(self) -> None:
        """Ask whether the service works. Raises UnreachableError, MismatchError."""
        await self._client.probe()

    async def start(self) -> None:
        """Begin with a service that may be away for now. Raises MismatchError: it isn't one of these rewards."""
        await self._caller.start()

    def forgive(self) -> None:
        """Count reward.outage_seconds of a service that is away from now on."""
        self._caller.forgive()

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
        self._caller.close()
        await self._client.close()

    async def _score(self, samples: list[RewardInput]) -> list[RewardOutput | Failure]:
        try:
            return await self._caller.call(lambda: self._client.score(samples, self._timeout_seconds))
        except (UnreachableError, MismatchError) as error:
            return [Failure(str(error))] * len(samples)
