"""Clients of a Redis by its URL, and writes that count only once replicas have them."""

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import redis
from redis.connection import parse_url

from relaxd.redis_client.address import parse
from relaxd.redis_client.primary import PrimaryConnection, PrimaryLookup, PrimaryTlsConnection

MARK_KEY = "relaxd:acknowledged"
MARK = "#!lua flags=allow-oom\nreturn redis.call('INCR', KEYS[1])"
"""A write. WAIT waits for the last write of its own connection, but what is repeated after a lost reply may find its
work done, by another connection, and write nothing. Its number only rises, unless a primary lacks acknowledged
writes."""

logger = logging.getLogger(__name__)
_marks: WeakKeyDictionary[redis.Redis, int] = WeakKeyDictionary()
"""The last acknowledged mark of each client."""


def connect(url: str, *, seconds: float, **settings: Any) -> redis.Redis:
    """Return a client of the server that a URL names or, with Sentinels, of whichever server is the primary.

    Args:
        url: see relaxd.redis_client.address.
        seconds: deadline of each connect and each read.
        settings: those of redis.Redis.

    Raises ValueError: the URL is wrong.
    """
    address = parse(url)
    if not address.sentinels:
        return redis.Redis.from_url(address.url, socket_timeout=seconds, socket_connect_timeout=seconds, **settings)
    given: dict[str, Any] = dict(parse_url(address.url))
    for name in ("host", "port", "connection_class"):
        given.pop(name, None)
    tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
    given |= settings | {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    lookup = PrimaryLookup(address, {**tls, "ssl": True} if address.tls else {})
    pool = redis.ConnectionPool(
        connection_class=PrimaryTlsConnection if address.tls else PrimaryConnection, lookup=lookup, **given
    )
    return redis.Redis.from_pool(pool)


def acknowledged(
    client: redis.Redis, commands: Callable[[redis.client.Pipeline], object], *, replicas: int, seconds: float
) -> list[Any]:
    """Send commands in one round trip, and return their replies once `replicas` replicas have all that came before.

    Raises the first error among the replies; redis.ConnectionError with NOREPLICAS when too few replicas have it within
    `seconds`. Then it may have taken effect or not, as after a lost reply. Logs an error when the primary lacks what
    replicas once had.
    """
    before = _marks.get(client, 0)  # of a mark that is set from now on, this is a lower bound
    with client.pipeline(transaction=False) as pipe:
        commands(pipe)
        if replicas:
            pipe.eval(MARK, 1, MARK_KEY)
            pipe.execute_command("WAIT", replicas, max(1, int(seconds * 1000)))
        replies = pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, redis.ResponseError) and "WAIT cannot be used with replica" in str(reply):
            raise redis.ConnectionError("READONLY it was demoted after a write and before its WAIT") from reply
        if isinstance(reply, Exception):
            raise reply
    if not replicas:
        return replies
    *replies, mark, have_it = replies
    if have_it < replicas:
        # A primary that is cut off keeps its connections, while the Sentinels name another: ask them again.
        client.connection_pool.disconnect(inuse_connections=False)
        raise redis.ConnectionError(
            f"NOREPLICAS {have_it} of {replicas} replicas (wait_replicas) have a write after {seconds:.1f} s"
        )
    if mark <= before:
        logger.error(
            "Redis has lost writes that %d replicas had (mark %d came after %d): a server that lacked them became the "
            "primary. The logs of the Sentinels say when (+switch-master); docs/reliability.md says what prevents it",
            *(replicas, mark, before),
        )
    _marks[client] = mark
    return replies


def is_cluster_node(client: redis.Redis) -> bool:
    """Return whether a server is a node of a Redis Cluster, which relaxd's scripts can't work on."""
    facts: Any = client.info("cluster")
    return bool(facts.get("cluster_enabled"))
