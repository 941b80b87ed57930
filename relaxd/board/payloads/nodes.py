"""Data nodes (board.data_urls): which payload is on which, the room that they have, and which of them can't be used.

Large payloads are on data nodes, if there are any; pointers, scripts and small columns never are.
"""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from relaxd.board.sizes import NO_EVICTION, RedisMemory
from relaxd.redis_client import parse, where
from relaxd.redis_client.moves import Move, ask, is_cluster_node

HIGH_WATER = 0.8
"""Share of a data node's maxmemory that open groups may take."""
UNLIMITED_SHARE = 0.25
"""Share of its machine's memory that a data node without a maxmemory is taken to have."""


def node_of(payload: str, nodes: int) -> int:
    """Return the index of a payload's data node: a hash of its name spreads payloads evenly."""
    return crc32(payload.encode()) % nodes


def memory(nodes: int) -> Move[RedisMemory | None]:
    """Return the memory of all data nodes together, as if each were as large and as full as the worst of them.

    Payloads are spread evenly, so the first that is full is where the run stops. None: there are no data nodes.
    """
    found = []
    for node in range(nodes):
        found.append(_memory((yield from ask("INFO", "memory", at=node))))
    if not found:
        return None
    policies = [memory.policy for memory in found if memory.policy != NO_EVICTION]
    return RedisMemory(
        used=len(found) * max(memory.used for memory in found),
        max_bytes=len(found) * min(memory.max_bytes for memory in found),
        high_water=len(found) * min(memory.high_water for memory in found),
        policy=policies[0] if policies else NO_EVICTION,
    )


def problems(board: str, nodes: Sequence[str]) -> Move[list[str]]:
    """Say which data nodes can't be used: nodes of a cluster, servers under two names. Raises BoardUnavailable.

    `board`: the URL of the board's Redis; `nodes`: those of the data nodes.
    """
    names: dict[str, str] = {}
    found = []
    for node, url in ((None, board), *enumerate(nodes)) if nodes else ():
        name = where(url)
        server = str((yield from ask("INFO", "server", at=node))["run_id"])
        if server in names:
            found.append(f"{name} and {names[server]} are one server")
        elif not parse(url).nodes and (yield from is_cluster_node(at=node)):
            found.append(f"{name} is a node of a Redis Cluster (cluster_enabled:1): name a server of its own")
        names[server] = name
    return found


def _memory(facts: dict[str, Any]) -> RedisMemory:
    most = int(facts["maxmemory"]) or int(facts["total_system_memory"] * UNLIMITED_SHARE)
    return RedisMemory(int(facts["used_memory"]), most, int(most * HIGH_WATER), str(facts["maxmemory_policy"]))
