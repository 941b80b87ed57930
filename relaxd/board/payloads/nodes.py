"""The Redis servers that hold a run's payloads: the board's own and, with board.data_urls, data nodes.

Large payloads are on data nodes, if there are any; pointers, scripts and small columns never are.
"""

from collections.abc import Callable, Sequence
from typing import Any

from relaxd.board.connection import RedisConnection
from relaxd.board.errors import BoardError
from relaxd.board.sizes import NO_EVICTION, RedisMemory
from relaxd.redis_client import is_cluster_node, parse, where

HIGH_WATER = 0.8
"""Share of a data node's maxmemory that open groups may take."""
UNLIMITED_SHARE = 0.25
"""Share of its machine's memory that a data node without a maxmemory is taken to have."""


class PayloadNodes:
    """Connections to the board's Redis and to data nodes."""

    def __init__(self, board: RedisConnection, urls: Sequence[str], connect: Callable[[str], RedisConnection]) -> None:
        self.board = board
        self.data = tuple(connect(url) for url in urls)

    def at(self, node: int | None) -> RedisConnection:
        """Return the connection to a data node or, for None, to the board. Raises BoardError: there is no such node."""
        if node is None:
            return self.board
        if node >= len(self.data):
            raise BoardError(f"a payload is on data node {node}, but board.data_urls has {len(self.data)}")
        return self.data[node]

    @property
    def every(self) -> tuple[RedisConnection, ...]:
        """All connections, the board's first."""
        return (self.board, *self.data)

    def memory(self) -> RedisMemory | None:
        """Return the memory of all data nodes together, as if each were as large and as full as the worst of them.

        A hash spreads payloads evenly, so the first that is full is where the run stops. None: there are no data nodes.
        """
        found = [_memory(connection.run(lambda client: client.info("memory"))) for connection in self.data]
        if not found:
            return None
        policies = [memory.policy for memory in found if memory.policy != NO_EVICTION]
        return RedisMemory(
            used=len(found) * max(memory.used for memory in found),
            max_bytes=len(found) * min(memory.max_bytes for memory in found),
            high_water=len(found) * min(memory.high_water for memory in found),
            policy=policies[0] if policies else NO_EVICTION,
        )

    def problems(self) -> list[str]:
        """Say which data nodes can't be used: nodes of a cluster, servers under two names. Raises BoardUnavailable."""
        names: dict[str, str] = {}
        found = []
        for connection in self.every if self.data else ():
            name = where(connection.url)
            server = str(connection.run(lambda client: client.info("server"))["run_id"])
            if server in names:
                found.append(f"{name} and {names[server]} are one server")
            elif not parse(connection.url).nodes and connection.run(is_cluster_node):
                found.append(f"{name} is a node of a Redis Cluster (cluster_enabled:1): name a server of its own")
            names[server] = name
        return found

    def close(self) -> None:
        """Close all connections."""
        for connection in self.every:
            connection.close()


def _memory(facts: dict[str, Any]) -> RedisMemory:
    most = int(facts["maxmemory"]) or int(facts["total_system_memory"] * UNLIMITED_SHARE)
    return RedisMemory(int(facts["used_memory"]), most, int(most * HIGH_WATER), str(facts["maxmemory_policy"]))
