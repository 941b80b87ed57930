"""Blocking Redis clients, transient errors of Redis, and writes that wait for Redis's replicas."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import redis
from redis.connection import parse_url
from redis.driver_info import DriverInfo

from relaxd.redis_client.lookups import (
    FoundConnection,
    Lookup,
    OwnerConnection,
    OwnerLookup,
    OwnerTlsConnection,
    PrimaryConnection,
    PrimaryLookup,
    PrimaryTlsConnection,
    RedisAddress,
    mark_key,
    parse,
)

MARK_SECONDS = 30 * 24 * 3600
MARK = f"""#!lua flags=allow-oom
local mark = redis.call('INCR', KEYS[1])
redis.call('EXPIRE', KEYS[1], {MARK_SECONDS})
return mark"""
"""Script that increments the mark, a number in Redis. WAIT waits only for the last write of the same connection, but a
command that is repeated after a lost reply may write nothing; incrementing the mark is always a write. The number only
rises, unless a primary lacks acknowledged writes. The mark expires a month after the last write with its tag."""

DRIVER = DriverInfo()
"""Client name and version that connections announce. Otherwise, redis-py would read its version from disk for each
connection, and raise OSError when no more files can be opened."""

logger = logging.getLogger(__name__)


class TooFewReplicas(redis.ConnectionError):
    """Fewer of Redis's replicas have a write than wait_replicas requires."""


@dataclass
class WriteFence:
    """A client's record of its tag's mark, a number in Redis that each acknowledged write increments."""

    key: str
    last: int = 0
    """Number of the last mark that enough replicas acknowledged."""

    def asking(self, replicas: int, seconds: float) -> list[tuple[Any, ...]]:
        """Return the commands to append to a write: they increment the mark, and wait until replicas have it."""
        wait = ("WAIT", replicas, max(1, int(seconds * 1000)))
        return [("EVAL", MARK, 1, self.key), wait] if replicas else []

    def checked(self, replies: list[Any], before: int, replicas: int, seconds: float) -> list[Any]:
        """Check the replies to a write and the commands of `asking`, and return those to the write's own commands.

        Raises like `acknowledged`.

        `before`: the last acknowledged mark when the commands were sent.
        """
        for reply in replies:
            if isinstance(reply, redis.ResponseError) and "WAIT cannot be used with replica" in str(reply):
                raise redis.ConnectionError("READONLY it was demoted after a write and before its WAIT") from reply
            # A transaction's reply is the list of its commands' replies.
            without_errors(reply if isinstance(reply, list) else [reply])
        if not replicas:
            return replies
        *replies, number, have_it = replies
        if have_it < replicas:
            raise TooFewReplicas(
                f"NOREPLICAS {have_it} of {replicas} replicas (wait_replicas) have a write after {seconds:.1f} s"
            )
        if number <= before:
            logger.error(
                "Redis has lost writes that %d replicas had (mark %d came after %d): a server that lacked them became "
                "the primary. The logs of the Sentinels (+switch-master) or of the cluster's nodes say when; "
                "docs/reliability.md says what prevents it",
                *(replicas, number, before),
            )
        self.last = number
        return replies


marks: WeakKeyDictionary[Any, WriteFence] = WeakKeyDictionary()
"""Marks of this process's Redis clients, blocking and asyncio, by client."""


def connect(url: str, *, tag: str, seconds: float, **settings: Any) -> redis.Redis:
    """Return a client of the server that a URL names: a single server, the Sentinels' current primary, or a cluster's
    node.

    Args:
        url: see relaxd.redis_client.lookups.
        tag: tag of the keys that the client may use (relaxd.redis_client.lookups). In a cluster it finds no others.
        seconds: deadline of each connect and each read.
        settings: further settings of redis.Redis.

    Raises ValueError: the URL is wrong.
    """
    address = parse(url)
    settings["driver_info"] = DRIVER
    if address.sentinels or address.nodes:
        client = _found(address, tag, settings | {"socket_timeout": seconds, "socket_connect_timeout": seconds})
    else:
        client = redis.Redis.from_url(address.url, socket_timeout=seconds, socket_connect_timeout=seconds, **settings)
    marks[client] = WriteFence(mark_key(tag))
    return client


def _found(address: RedisAddress, tag: str, settings: dict[str, Any]) -> redis.Redis:
    """Return a client that looks up its server whenever it connects, in a cluster or at Sentinels."""
    lookup, given = lookup_of(address, tag)
    kind: type[FoundConnection]
    if address.nodes:
        kind = OwnerTlsConnection if address.tls else OwnerConnection
    else:
        kind = PrimaryTlsConnection if address.tls else PrimaryConnection
    pool = redis.ConnectionPool(connection_class=kind, lookup=lookup, **(given | settings))
    return redis.Redis.from_pool(pool)


def lookup_of(address: RedisAddress, tag: str) -> tuple[Lookup, dict[str, Any]]:
    """Return the lookup that finds the server of a tag's keys, and the connection settings in the URL."""
    given: dict[str, Any] = dict(parse_url(address.url))
    for name in ("host", "port", "connection_class"):
        given.pop(name, None)
    tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
    tls |= {"ssl": True} if address.tls else {}
    if address.nodes:
        users = {name: given[name] for name in ("username", "password") if name in given}
        return OwnerLookup(address, tag, tls | users), given
    return PrimaryLookup(address, tls), given


def acknowledged(
    client: redis.Redis, commands: Sequence[tuple[Any, ...]], *, replicas: int, seconds: float
) -> list[Any]:
    """Send commands in one round trip; return their replies once `replicas` replicas have all writes so far.

    Raises the first error among the replies; redis.ConnectionError with NOREPLICAS when too few replicas have the
    writes within `seconds`. The commands may have taken effect nevertheless, as after a lost reply. Logs an error when
    the primary lacks writes that replicas once had.
    """
    mark = marks[client]
    before = mark.last  # of a mark that is set from now on, this is a lower bound
    with client.pipeline(transaction=False) as pipe:
        for command in (*commands, *mark.asking(replicas, seconds)):
            pipe.execute_command(*command)
        replies = pipe.execute(raise_on_error=False)
    try:
        return mark.checked(replies, before, replicas, seconds)
    except TooFewReplicas:
        # A primary that is cut off keeps its connections after another was promoted: look it up again.
        client.connection_pool.disconnect(inuse_connections=False)
        mark_address_stale(client)
        raise


def read(client: redis.Redis, commands: Sequence[tuple[Any, ...]], *, atomic: bool = False) -> list[Any]:
    """Send commands in one round trip and return their replies. Raises the first error among the replies."""
    with client.pipeline(transaction=atomic) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return without_errors(pipe.execute(raise_on_error=False))


def without_errors(replies: list[Any]) -> list[Any]:
    """Return the replies unchanged, or raise the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def mark_address_stale(client: Any) -> None:
    """Make a client's next lookup of its server begin at another Sentinel or node. Does nothing for other clients."""
    if (lookup := client.connection_pool.connection_kwargs.get("lookup")) is not None:
        lookup.mark_address_stale()


def keys_of(client: redis.Redis, prefix: str) -> list[str]:
    """Return a server's keys that begin with `prefix`, the prefix of the client's tag. It must have no wildcards.

    Raises redis.ConnectionError: a cluster's node lost the slot during the scan, so keys may be missing.
    """
    with client.client() as one:  # a connection of its own
        found = [key if isinstance(key, str) else key.decode() for key in one.scan_iter(match=f"{prefix}*", count=1000)]
        one.exists(prefix)  # SCAN names no key, so a node that lost the slot answers it, too
    return found


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
"""Transient errors of Redis: the first word of each, and the state that it means, as the end of a sentence."""
OF_CLUSTER = {
    "MOVED": "has another node for these keys now",
    "ASK": "is moving these keys to another node",
    "TRYAGAIN": "is moving these keys to another node",
    "CLUSTERDOWN": "doesn't serve these keys now",
    "NOOWNER": "has no node for these keys",
}
"""Transient errors of a cluster: the first word of each, and the state that it means, as the end of a sentence."""
NO_ANSWER = "doesn't answer"


def passing(error: redis.RedisError) -> str:
    """Explain a transient error of Redis, as the end of a sentence; "" if the error is not transient."""
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
    """Explain an error of a cluster node that is used as a single server, as the end of a sentence; "" for other
    errors."""
    if isinstance(error, redis.exceptions.AskError | redis.exceptions.ClusterDownError):
        return f"is a node of a Redis Cluster, which a redis+cluster:// URL must name: {error.status_code} {error}"
    return ""
