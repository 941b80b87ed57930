"""Scores samples with a service at reward.address, alone or as one of several terms."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from relaxd.config import RewardConfig
from relaxd.config.reward import RewardTerm
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.scorers import parts_of_term, total
from services.reward.grpc_client import GrpcClient
from services.reward.patience import MismatchError, PatientCaller, UnreachableError
from services.reward.worker_pool import REWARD_OF_RUN, Failure, WorkerPool


class Client(Protocol):
    """Client of one reward service."""

    calls_per_sample: bool
    """True if `score` takes one sample instead of several of one prompt."""

    async def probe(self) -> None:
        """Ask whether the service works. Raises UnreachableError, MismatchError."""

    async def score(self, samples: Sequence[RewardInput], seconds: float) -> list[RewardOutput | Failure]:
        """Score samples of one prompt within `seconds`. Raises UnreachableError, MismatchError."""

    async def close(self) -> None:
        """Close its connections."""


def _client(config: RewardConfig) -> Client:
    if "://" not in config.address:
        return GrpcClient(config)
    from services.reward.http_services import HttpReward  # most runs need no HTTP: 0.15 s

    return HttpReward(config)


class RemoteScorer(PatientCaller):
    """Calls a reward service: limits concurrent calls, repeats those that don't reach it, waits while it is down."""

    def __init__(self, config: RewardConfig) -> None:
        self._client = _client(config)
        super().__init__(
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
        """A counter of samples, probes and checks, which shows that the replica isn't stuck."""
        return self._scored + super().pieces

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
        self.end_probing()
        await self._client.close()

    async def _score(self, samples: list[RewardInput]) -> list[RewardOutput | Failure]:
        try:
            return await self.call(lambda: self._client.score(samples, self._timeout_seconds))
        except (UnreachableError, MismatchError) as error:
            return [Failure(str(error))] * len(samples)


def of_workers(config: RewardConfig) -> RewardConfig | None:
    """Return the part of a reward that workers score, without terms at addresses; None if no part remains."""
    if config.address or not config.calls_services:
        return None if config.address else config
    own = tuple(term.model_copy(update={"only_if": ""}) for term in config.terms if not term.address)
    return config.model_copy(update={"terms": own}) if own else None


class RemoteTerms:
    """Calls the services of the terms at addresses, and the pool for the other terms, concurrently."""

    def __init__(self, config: RewardConfig, pool: WorkerPool) -> None:
        """`pool`: workers with the reward `of_workers(config)`. Raises MissingVariableError."""
        self._terms = config.terms
        self._pool = pool
        self._timeout_seconds = config.timeout_seconds
        self._remote = {term.shown: RemoteScorer(_alone(config, term)) for term in config.terms if term.address}
        self._uses_pool = len(self._remote) < len(config.terms)

    @property
    def pieces(self) -> int:
        return sum(remote.pieces for remote in self._remote.values())

    @property
    def detail(self) -> str:
        return next((remote.detail for remote in self._remote.values() if remote.detail), "")

    async def probe(self) -> None:
        """Ask whether every service works. Raises UnreachableError, MismatchError."""
        for remote in self._remote.values():
            await remote.probe()

    async def start(self) -> None:
        """Start the callers of all services. Raises MismatchError."""
        for remote in self._remote.values():
            await remote.start()

    def forgive(self) -> None:
        for remote in self._remote.values():
            remote.forgive()

    async def close(self) -> None:
        """End the calls of the services."""
        for remote in self._remote.values():
            await remote.close()

    async def score(self, samples: Sequence[RewardInput]) -> list[RewardOutput | Failure]:
        """Score samples of one prompt; a sample fails if any term can't score it. Raises PoolClosedError."""
        tasks = {label: asyncio.create_task(remote.score(samples)) for label, remote in self._remote.items()}
        if self._uses_pool:
            tasks[REWARD_OF_RUN] = asyncio.create_task(self._pool.score(REWARD_OF_RUN, samples, self._timeout_seconds))
        try:
            found = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()
        return [self._sum({label: outcomes[n] for label, outcomes in found.items()}) for n in range(len(samples))]

    def _sum(self, outcomes: dict[str, RewardOutput | Failure]) -> RewardOutput | Failure:
        parts: dict[str, float] = {}
        for outcome in outcomes.values():
            if isinstance(outcome, Failure):
                return outcome
        if isinstance(local := outcomes.get(REWARD_OF_RUN), RewardOutput):
            parts |= local.parts
        for term in self._terms:
            if isinstance(remote := outcomes.get(term.shown), RewardOutput):
                parts |= parts_of_term(term, remote)
        return RewardOutput(total(self._terms, parts), parts)


def _alone(config: RewardConfig, term: RewardTerm) -> RewardConfig:
    """Return a term at an address as a separate reward."""
    own = {name: getattr(term, name) for name in ("address", "address_token", "settings", "key")}
    limits = {name: getattr(config, name) for name in ("timeout_seconds", "max_in_flight", "outage_seconds")}
    return RewardConfig(**own, **limits)
