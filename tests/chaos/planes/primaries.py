"""What a job keeps its board in: one Redis, a primary with a replica behind Sentinels, or a cluster of primaries."""

from pathlib import Path

from relaxd.redis_client import COORDINATOR
from relaxd.redis_client.lookups import slot_of
from tests.kit.redis.clusters import PRIMARIES as NODES
from tests.kit.redis.clusters import SHARE, ClusterServers
from tests.kit.redis.sentinels import WatchedRedis

RUN = "chaos"
"""The run of a job, and so the tag of its keys."""
PRIMARIES = ("single", "sentinel", "cluster")
SENTINELS = 3
DOWN_MILLISECONDS = 5000
"""Silence after which a primary counts as dead: on a busy machine a living one may be silent for a second."""


def primaries_of(servers: str, folder: Path) -> WatchedRedis | ClusterServers | None:
    """Return the servers, which are still to be started; None for a single one."""
    if servers == "single":
        return None
    (place := folder / "redis-servers").mkdir(parents=True, exist_ok=True)
    if servers == "sentinel":
        return WatchedRedis(place, sentinels=SENTINELS, down_milliseconds=DOWN_MILLISECONDS)
    return ClusterServers(place, replicated=tags(), down_milliseconds=DOWN_MILLISECONDS)


def tags() -> tuple[str, ...]:
    """Return tags whose keys are on all primaries of a cluster: the run's, the coordinator's, others if need be."""
    chosen: list[str] = []
    for tag in (RUN, COORDINATOR, *(f"other-{number}" for number in range(100))):
        if tag in (RUN, COORDINATOR) or slot_of(tag) // SHARE not in {slot_of(one) // SHARE for one in chosen}:
            chosen.append(tag)
    assert len({slot_of(tag) // SHARE for tag in chosen}) == NODES
    return tuple(chosen)
