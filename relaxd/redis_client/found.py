"""Connections to servers that are looked up whenever one is made."""

from collections.abc import Mapping
from typing import Any, Protocol

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

ASK_SECONDS = 1.0
"""Deadline of each lookup, in seconds: the next server may know better."""


class Lookup(Protocol):
    """Knows servers that know where a connection leads."""

    def find(self) -> tuple[str, int]:
        """Return host and port. Raises redis.ConnectionError: nobody knows."""
        ...

    def doubt(self) -> None:
        """Ask another server first the next time: what this one said may be out of date."""
        ...


class FoundConnection(redis.Connection):
    """A connection that asks where it leads whenever it is made."""

    def __init__(self, *, lookup: Lookup, **settings: Any) -> None:
        self._lookup = lookup
        super().__init__(**settings)

    def _connect(self) -> Any:
        self.host, self.port = self._lookup.find()
        try:
            return super()._connect()
        except OSError:
            self._lookup.doubt()  # whoever named a dead server may be cut off from those that know its successor
            raise


def ask(host: str, port: int, settings: Mapping[str, Any], *words: str) -> Any:
    """Send a server one command. Raises redis.RedisError, OSError."""
    seconds: dict[str, Any] = {"socket_timeout": ASK_SECONDS, "socket_connect_timeout": ASK_SECONDS}
    once = Retry(NoBackoff(), 0)  # the next one may know; redis-py would ask this one again for seconds
    with redis.Redis(host, port, protocol=2, decode_responses=True, retry=once, **seconds, **settings) as client:
        return client.execute_command(*words)
