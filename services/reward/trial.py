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

from relaxd.rewards import RewardInput
from services.reward.environment import MissingVariableError
from services.reward.pool import Failure, WorkerPool


async def try_reward(
    reward: str, samples: Sequence[RewardInput], timeout_seconds: float, variables: Sequence[str]
) -> dict[str, Any]:
    """Score samples one after the other. Returns what the program prints."""
    try:
        pool = WorkerPool(1, variables)
    except MissingVariableError as error:
        return {"error": str(error)}
    try:
        if failure := await pool.load(reward):
            return {"error": failure.reason}
        return {"outcomes": [await _try_sample(pool, reward, sample, timeout_seconds) for sample in samples]}
    finally:
        pool.close()


async def _try_sample(pool: WorkerPool, reward: str, sample: RewardInput, timeout_seconds: float) -> dict[str, Any]:
    begun = time.monotonic()
    (outcome,) = await pool.score(reward, [sample], timeout_seconds)
    seconds = time.monotonic() - begun
    if isinstance(outcome, Failure):
        return {"error": outcome.reason, "traceback": outcome.traceback, "seconds": seconds}
    return {"reward": outcome.reward, "parts": outcome.parts, "seconds": seconds}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m services.reward.trial", description=__doc__)
    parser.add_argument("--reward", required=True, help="bundled name, or package.module:function")
    parser.add_argument("--timeout-seconds", type=float, required=True, help="deadline of one sample")
    parser.add_argument("--variable", action="append", default=[], help="environment variable to pass on")
    words = parser.parse_args()
    samples = [RewardInput(**json.loads(line)) for line in sys.stdin if line.strip()]
    try:
        result = asyncio.run(try_reward(words.reward, samples, words.timeout_seconds, words.variable))
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
