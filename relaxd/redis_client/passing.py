"""Errors of Redis that pass: whoever gets one waits, and tries again."""

import redis

PASSING = {
    "OOM": "is full (maxmemory)",
    "READONLY": "is a replica now, not the primary",
    "NOREPLICAS": "has too few replicas to take writes",
    "MISCONF": "can't write to its disk",
    "LOADING": "is loading its data",
    "BUSY": "is busy with a script",
    "MASTERDOWN": "has lost its primary",
    "UNBLOCKED": "is becoming a replica",
    "NOPRIMARY": "has no primary",
}
"""Transient errors by their first word, and the state of Redis that each means."""


def passing(error: redis.RedisError) -> str:
    """Explain why Redis is unavailable, as the end of a sentence; "" if the error is not transient."""
    if isinstance(error, redis.AuthenticationError):
        return f"refuses the password: {error}"
    # redis-py cuts the first word off where it has a class for it.
    word = error.status_code or str(error).split(" ", 1)[0]
    if word in PASSING:
        return f"{PASSING[word]}: {error}"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"doesn't answer: {error}"
    return ""
