"""Reward for replies that match a regular expression."""

import re
from functools import lru_cache

from relaxd.rewards.interface import RewardInput, TooSlow, time_limit

MATCH_SECONDS = 1.0
"""Maximum seconds to match a reply; a slower reply counts as no match."""


def regex(sample: RewardInput, pattern: str = "", full: bool = False) -> dict[str, float]:
    """1 if a regular expression is found in the reply, else 0.

    Settings: pattern: a Python regular expression, by default the prompt's answer; full = true: the pattern must match
    all of the reply, without surrounding white space. Part: too_slow: 1 if matching took longer than a second, which
    counts as no match.

    Raises:
        ValueError: the pattern is missing or no regular expression.
    """
    compiled = _compile(pattern or sample.answer)
    try:
        with time_limit(MATCH_SECONDS):
            found = compiled.fullmatch(sample.response.strip()) if full else compiled.search(sample.response)
    except TooSlow:
        return {"reward": 0.0, "too_slow": 1.0}
    return {"reward": float(found is not None), "too_slow": 0.0}


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise ValueError("there is no pattern: set reward.settings.pattern, or give prompts an answer that is one")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern is {pattern!r}, which is no regular expression: {error}") from error
