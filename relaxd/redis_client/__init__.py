"""Connections to the board's Redis: its URL, the server that it means now, writes that outlive that server."""

from relaxd.redis_client.address import RedisAddress, parse, where, with_access_of
from relaxd.redis_client.asynchronous import acknowledged_async, connect_async, keys_of_async, read_async
from relaxd.redis_client.client import acknowledged, connect, keys_of, read
from relaxd.redis_client.keys import COORDINATOR, key_prefix
from relaxd.redis_client.passing import misnamed, passing

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
