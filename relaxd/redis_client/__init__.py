"""Connections to the board's Redis: parsed URLs, lookup of the current server, and writes that survive its failure."""

from relaxd.redis_client.asyncio_client import acknowledged_async, connect_async, keys_of_async, read_async
from relaxd.redis_client.blocking_client import acknowledged, connect, keys_of, misnamed, passing, read
from relaxd.redis_client.lookups import COORDINATOR, RedisAddress, key_prefix, parse, where, with_access_of

__all__ = [
    "COORDINATOR",
    "RedisAddress",
    "acknowledged",
    "acknowledged_async",
    "connect",
    "connect_async",
    "key_prefix",
    "keys_of",
    "keys_of_async",
    "misnamed",
    "parse",
    "passing",
    "read",
    "read_async",
    "where",
    "with_access_of",
]
