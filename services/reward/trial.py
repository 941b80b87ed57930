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


async def try_reward(config: RewardConfig, samples: Sequence[RewardInput]) -> dict[str, Any]:
    """Score samples one after the other. Returns what the program prints."""
    try:
        pool = WorkerPool(1, config)
    except MissingVariableError as error:
        return {"error": str(error)}
    try:
        if failure := await pool.load(RUNS_REWARD):
            return {"error": failure.reason}
        return {"outcomes": [await _try_sample(pool, sample, config.timeout_seconds) for sample in samples]}
    finally:
        pool.close()


async def _try_sample(pool: WorkerPool, sample: RewardInput, timeout_seconds: float) -> dict[str, Any]:
    begun = time.monotonic()
    (outcome,) = await pool.score(RUNS_REWARD, [sample], timeout_seconds)
    seconds = time.monotonic() - begun
    if isinstance(outcome, Failure):
        return {"error": outcome.reason, "traceback": outcome.traceback, "seconds": seconds}
    return {"reward": outcome.reward, "parts": outcome.parts, "seconds": seconds}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m services.reward.trial", description=__doc__)
    parser.add_argument("--config", required=True, help="the run's section [reward] as JSON")
    words = parser.parse_args()
    samples = [RewardInput(**json.loads(line)) for line in sys.stdin if line.strip()]
    try:
        result = asyncio.run(try_reward(RewardConfig.model_validate_json(words.config), samples))
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
