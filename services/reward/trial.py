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
from services.reward.environment import MissingVariableError
from services.reward.pool import Failure, WorkerPool
from services.reward.service import RUNS_REWARD


async def try_reward(config: RewardConfig, samples: Sequence[RewardInput], workers: int) -> dict[str, Any]:
    """Score samples, as many at once as there are workers. Returns what the program prints."""
    try:
        pool = WorkerPool(workers, config)
    except MissingVariableError as error:
        return {"error": str(error)}
    try:
        if failure := await pool.load(RUNS_REWARD):
            return {"error": failure.reason}
        room = asyncio.Semaphore(workers)
        return {"outcomes": await asyncio.gather(*(_try_sample(pool, sample, config, room) for sample in samples))}
    finally:
        pool.close()


async def _try_sample(
    pool: WorkerPool, sample: RewardInput, config: RewardConfig, room: asyncio.Semaphore
) -> dict[str, Any]:
    async with room:
        begun = time.monotonic()
        (outcome,) = await pool.score(RUNS_REWARD, [sample], config.timeout_seconds)
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
