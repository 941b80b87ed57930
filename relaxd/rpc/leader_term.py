"""Fencing terms of coordinators: a replica or launcher obeys only the newest coordinator that it knows.

Each coordinator that starts takes the next term. Its calls carry the term as metadata `relaxd-term`, and the server's
interceptor refuses an older one.
"""

import asyncio
import re
from typing import Protocol

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from relaxd.redis_client import COORDINATOR, connect, key_prefix
from relaxd.rpc.access import needs_term
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument, Unavailable

TERM_METADATA = "relaxd-term"
TERM_KEY = key_prefix(COORDINATOR) + "term"
"""Redis key that holds the newest coordinator's term; each coordinator that starts increments the value by 1."""
TIMEOUT_SECONDS = 3.0
TERM = re.compile("[1-9][0-9]{0,18}", re.ASCII)


class Fence(Protocol):
    """Interface: decides by a coordinator's term whether to obey its calls."""

    async def check(self, term: int) -> None:
        """Raise FailedPrecondition if a coordinator newer than `term` is known."""


async def check_term(fence: Fence, method: str, given: str | bytes | None) -> None:
    """Reject a call of a replaced coordinator, by the term that the call carries, and an order without a term.

    Args:
        fence: the server's fence.
        method: path of the called method, such as "/relaxd.v1.Replica/Drain".
        given: the call's `relaxd-term` metadata.

    Raises FailedPrecondition with reason TERM_MISSING or TERM_SUPERSEDED, and InvalidArgument.
    """
    if given is None:
        if needs_term(method):
            raise FailedPrecondition(
                f"{method} needs the coordinator's term, which its GetStatus shows; "
                f"grpcurl -H '{TERM_METADATA}: ...' sends it",
                reason="TERM_MISSING",
            )
        return
    text = given.decode("ascii", "replace") if isinstance(given, bytes) else given
    if not TERM.fullmatch(text):
        raise _invalid(f"is {text[:40]!r}: it must be the coordinator's term, a positive integer")
    await fence.check(int(text))


class NewestTerm:
    """Fence of a replica: remembers the newest coordinator term in a call or in the answer to a heartbeat."""

    def __init__(self) -> None:
        self.newest = 0
        """The newest coordinator term seen; 0 before any. An answer to a heartbeat may lower it, because terms start
        again at 1 on a new Redis."""

    async def check(self, term: int) -> None:
        if term < self.newest:
            raise _superseded(term, self.newest)
        self.newest = term


class RedisTerm:
    """Fence of the launcher: reads the newest coordinator's term from Redis at each check."""

    def __init__(self, redis_url: str) -> None:
        self._redis = connect(
            redis_url,
            tag=COORDINATOR,
            seconds=TIMEOUT_SECONDS,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
            health_check_interval=15,
        )

    async def check(self, term: int) -> None:
        """Raise FailedPrecondition for a term older than the newest one.

        Raises InvalidArgument for a term that no coordinator has, Unavailable when Redis doesn't answer, and
        FailedPrecondition when it refuses the user or the password.
        """
        newest = await asyncio.to_thread(self._newest)
        if term > newest:
            raise _invalid(f"is {term}: it must be {newest}, the newest one on the launcher's Redis (0: there is none)")
        if term < newest:
            raise _superseded(term, newest)

    def _newest(self) -> int:
        try:
            return int(self._redis.get(TERM_KEY) or 0)
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise FailedPrecondition(
                f"Redis refuses the launcher's user or password (RELAXD_REDIS, RELAXD_REDIS_PASSWORD_FILE): {error}"
            ) from error
        except redis.RedisError as error:
            raise Unavailable(f"Redis, which has the coordinator's term, does not answer: {error}") from error


def _superseded(term: int, newest: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"the coordinator of term {term} was replaced: the newest has {newest}", reason="TERM_SUPERSEDED"
    )


def _invalid(problem: str) -> InvalidArgument:
    return InvalidArgument(f"{TERM_METADATA} {problem}", [(TERM_METADATA, problem)])
