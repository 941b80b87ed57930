"""Connections to the board's Redis: its URL, the server that it means now, writes that outlive that server."""

from relaxd.redis_client.address import RedisAddress, parse, where, with_access_of
from relaxd.redis_client.client import acknowledged, connect, is_cluster_node
from relaxd.redis_client.passing import passing

__all__ = ["RedisAddress", "acknowledged", "connect", "is_cluster_node", "parse", "passing", "where", "with_access_of"]
