"""Scoring of one reply, as the tables of rewards do it."""

import time
from typing import Any

from relaxd.rewards import RewardInput, check_output, resolve

LONG = "so we think about it. " * 5000
"""110,000 characters that say nothing."""
SECONDS = 1.5
"""Most computing time of one check, whatever the reply: far below the deadline of a sample."""

LIMITS = {"seconds": 0.5, "total_seconds": 5.0, "memory_mb": 256, "output_kb": 64}


def score(
    name: str, response: str, answer: str = "", metadata: dict[str, Any] | None = None, tokens: int = 0, **settings: Any
) -> dict[str, float]:
    """Return the reward and its parts. Raises AssertionError if the check takes long, and what the reward raises."""
    reward = resolve(name, settings)
    sample = RewardInput(prompt="", response=response, answer=answer, metadata=metadata or {}, tokens=tokens)
    begun = time.process_time()
    output = check_output(reward(sample))
    taken = time.process_time() - begun
    assert taken < SECONDS, f"{name} computed for {taken:.1f} s"
    return {"reward": output.reward, **output.parts}
