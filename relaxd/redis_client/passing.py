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
OF_CLUSTER = {
    "MOVED": "has another node for these keys now",
    "ASK": "is moving these keys to another node",
    "TRYAGAIN": "is moving these keys to another node",
    "CLUSTERDOWN": "doesn't serve these keys now",
    "NOOWNER": "has no node for these keys",
}
"""The same of a cluster, once its connection has given up the node."""
NO_ANSWER = "doesn't answer"


def passing(error: redis.RedisError) -> str:
    """Explain why Redis is unavailable, as the end of a sentence; "" if the error is not transient."""
    if isinstance(error, redis.AuthenticationError):
        return f"refuses the password: {error}"
    # redis-py cuts the first word off where it has a class for it.
    word = error.status_code or str(error).split(" ", 1)[0]
    if word == "EXECABORT":  # Redis took all commands of a transaction, and then refused to carry them out
        word = str(error).partition("because of: ")[2].split(" ", 1)[0]
    if word in PASSING:
        return f"{PASSING[word]}: {error}"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"{OF_CLUSTER.get(word, NO_ANSWER)}: {error}"
    return ""


def misnamed(error: redis.RedisError) -> str:
    """Explain what a single server says that is a node of a cluster, as the end of a sentence; "" for other errors."""
    if isinstance(error, redis.exceptions.AskError | redis.exceptions.ClusterDownError):
        return f"is a node of a Redis Cluster, which a redis+cluster:// URL must name: {error.status_code} {error}"
    return ""
