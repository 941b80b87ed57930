"""A reward that can't be learned, so every step changes the weights, and takes its time, so faults find work."""

import os
import time
import zlib
from pathlib import Path
from typing import Any

from relaxd.rewards import judge

SECONDS = 0.2
HUGE_VARIABLE = "CHAOS_HUGE_REWARDS"
"""Names a folder, which exists from the start, so that the sandbox lets rewards read it."""
HUGE_FILE = "huge-rewards"
"""While this file is in that folder, rewards are huge."""
HUGE = 1e38
"""Advantages of this size fit float32. The gradient that they make doesn't."""


async def arbitrary(sample: Any) -> dict[str, float]:
    await judge.ask(sample.response)
    return unjudged(sample)


def unjudged(sample: Any) -> dict[str, float]:
    time.sleep(SECONDS)
    reward = zlib.crc32(f"{sample.response}{sample.environment_reward or ''}".encode()) / 2**32
    return {"reward": reward * (HUGE if Path(os.environ[HUGE_VARIABLE], HUGE_FILE).exists() else 1.0)}
