"""A sum of rewards some of which are services at addresses: reward.terms with address."""

import asyncio
from collections.abc import Sequence

from relaxd.config import RewardConfig
from relaxd.config.reward import RewardTerm
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.scorers import parts_of_term, total
from services.reward.pool import Failure, WorkerPool
from services.reward.remote.scorer import RemoteScorer

RUNS_REWARD = ""
"""Name by which the pool knows the run's reward."""


def of_workers(config: RewardConfig) -> RewardConfig | None:
    """Return the part of a reward that workers score: all, without the terms at addresses, or None if that is all."""
    if config.address or not config.calls_services:
        return None if config.address else config
    own = tuple(term.model_copy(update={"only_if": ""}) for term in config.terms if not term.address)
    return config.model_copy(update={"terms": own}) if own else None


class RemoteTerms:
    """Calls the services of the terms at addresses, and the pool for the others, at the same time."""

    def __init__(self, config: RewardConfig, pool: WorkerPool) -> None:
        """Prepare. The pool's reward is `of_workers(config)`. Raises MissingVariableError."""
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

    async def check(self) -> None:
        """Ask whether every service works. Raises UnreachableError, MismatchError."""
        for remote in self._remote.values():
            await remote.check()

    async def start(self) -> None:
        """See RemoteScorer. Raises MismatchError."""
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
        """Score samples of one prompt; one that a term can't score fails. Raises PoolClosedError."""
        tasks = {label: asyncio.create_task(remote.score(samples)) for label, remote in self._remote.items()}
        if self._uses_pool:
            tasks[RUNS_REWARD] = asyncio.create_task(self._pool.score(RUNS_REWARD, samples, self._timeout_seconds))
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
        if isinstance(local := outcomes.get(RUNS_REWARD), RewardOutput):
            parts |= local.parts
        for term in self._terms:
            if isinstance(remote := outcomes.get(term.shown), RewardOutput):
                parts |= parts_of_term(term, remote)
        return RewardOutput(total(self._terms, parts), parts)


def _alone(config: RewardConfig, term: RewardTerm) -> RewardConfig:
    """Return a term at an address as a whole reward."""
    own = {name: getattr(term, name) for name in ("address", "address_token", "settings", "key")}
    limits = {name: getattr(config, name) for name in ("timeout_seconds", "max_in_flight", "outage_seconds")}
    return RewardConfig(**own, **limits)
