"""Tries a reward on samples, as reward workers do, without the service: `python -m services.reward.trial --help`.

Reads a sample per line, as JSON with the fields of RewardInput. Prints one JSON object: {"error": reason} if the reward
can't be loaded, else {"outcomes": [...]} with reward, parts and seconds of each sample, or error and traceback.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput
from services.reward.cache import Score, Scored
from services.reward.environment import MissingVariableError
from services.reward.pool import Failure, WorkerPool
from services.reward.remote.errors import MismatchError, UnreachableError
from services.reward.remote.scorer import RemoteScorer
from services.reward.service import RUNS_REWARD


async def try_reward(config: RewardConfig, samples: Sequence[RewardInput], workers: int) -> dict[str, Any]:
    """Score samples, as many at once as there are workers. Returns what the program prints."""
    if config.address:
        return await _try_remote(config, samples, workers)
    try:
        pool = WorkerPool(workers, config)
    except MissingVariableError as error:
        return {"error": str(error)}
    try:
        if failure := await pool.load(RUNS_REWARD):
            return {"error": failure.reason}

        async def score(samples: Sequence[RewardInput]) -> Scored:
            return await pool.score(RUNS_REWARD, samples, config.timeout_seconds)

        return {"outcomes": await _try_all(score, samples, workers)}
    finally:
        pool.close()


async def _try_remote(config: RewardConfig, samples: Sequence[RewardInput], workers: int) -> dict[str, Any]:
    """See `try_reward`. A service that can't be reached is an error here: nobody waits for it."""
    try:
        remote = RemoteScorer(config)
    except MissingVariableError as error:
        return {"error": str(error)}
    try:
        await remote.check()
        return {"outcomes": await _try_all(remote.score, samples, workers)}
    except UnreachableError as error:
        return {"error": f"the reward service at {config.address} can't be reached: {error}"}
    except MismatchError as error:
        return {"error": str(error)}
    finally:
        await remote.close()


async def _try_all(score: Score, samples: Sequence[RewardInput], workers: int) -> list[dict[str, Any]]:
    room = asyncio.Semaphore(workers)
    return await asyncio.gather(*(_try_sample(score, sample, room) for sample in samples))


async def _try_sample(score: Score, sample: RewardInput, room: asyncio.Semaphore) -> dict[str, Any]:
    async with room:
        begun = time.monotonic()
        (outcome,) = await score([sample])
        seconds = time.monotonic() - begun
    if isinstance(outcome, Failure):
        return {"error": outcome.reason, "traceback": outcome.traceback, "seconds": seconds}
    return {"reward": outcome.reward, "parts": outcome.parts, "seconds": seconds}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m services.reward.trial", description=__doc__)
    parser.add_argument("--config", required=True, help="the run's section [reward] as JSON")
    parser.add_argument("--workers", type=int, default=1, help="samples to score at once")
    words = parser.parse_args()
    samples = [RewardInput(**json.loads(line)) for line in sys.stdin if line.strip()]
    try:
        result = asyncio.run(try_reward(RewardConfig.model_validate_json(words.config), samples, words.workers))
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
