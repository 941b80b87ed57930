"""Reading the current coordinator's epoch."""

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from relaxd.rpc.errors import FailedPrecondition, Unavailable

EPOCH_KEY = "relaxd:coordinator:epoch"
"""Redis key of the newest coordinator's epoch. Each coordinator that starts adds one to it."""
TIMEOUT_SECONDS = 3.0


class Epochs:
    """The epochs of the coordinators that share a Redis. Thread-safe."""

    def __init__(self, redis_url: str) -> None:
        self._redis = redis.Redis.from_url(
            redis_url,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
            health_check_interval=15,
        )

    def newest(self) -> int:
        """Return the newest coordinator's epoch; 0 when none has started yet.

        Raises Unavailable when Redis doesn't answer, FailedPrecondition when it refuses the user or the password.
        """
        try:
            return int(self._redis.get(EPOCH_KEY) or 0)
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise FailedPrecondition(
                f"Redis refuses the launcher's user or password (RELAXD_REDIS, RELAXD_REDIS_PASSWORD_FILE): {error}"
            ) from error
        except redis.RedisError as error:
            raise Unavailable(f"Redis, which has the coordinator's epoch, does not answer: {error}") from error
