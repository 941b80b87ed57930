"""Decide after an error whether a connection tries again, when, or which error it raises."""

import time

import redis
from redis.exceptions import ResponseError

from relaxd.board.connections.scripts import translate
from relaxd.board.errors import BoardError, BoardUnavailable
from relaxd.redis_client import misnamed, passing, where
from relaxd.retry import Backoff

BACKOFF = Backoff(first_seconds=0.02, max_seconds=1.0)


class Retries:
    """The attempts of one operation."""

    def __init__(self, url: str, seconds: float) -> None:
        """`seconds` limits all attempts together."""
        self._url = url
        self._deadline = time.monotonic() + seconds
        self._failures = 0

    def pause_after(self, error: redis.RedisError) -> float:
        """Return the seconds until the next attempt.

        Raises what the error means: BoardUnavailable once there is no time left, another BoardError if Redis refuses
        the operation, and an error that says nothing about Redis as it is.
        """
        if not (why := passing(error)):
            if why := misnamed(error):
                raise BoardError(f"Redis at {where(self._url)} {why}") from error
            if isinstance(error, ResponseError):
                raise translate(error) from error
            raise error
        self._failures += 1
        pause = BACKOFF.pause(self._failures)
        if time.monotonic() + pause > self._deadline:
            raise BoardUnavailable(f"Redis at {where(self._url)} {why}") from error
        return pause
