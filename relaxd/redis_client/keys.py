"""Names of keys: everything that belongs to one tag is under one prefix, and in one slot of a Redis Cluster.

A run's tag is its id; the coordinator's own records have one, too. Scripts may find the keys of their tag as they run:
the node that has one of them has all.
"""

from redis.crc import key_slot

COORDINATOR = "coordinator"
"""The coordinator's tag. No run may have this id."""


def key_prefix(tag: str) -> str:
    """Return the prefix of a tag's keys. Redis Cluster hashes what is in the braces."""
    return f"relaxd:{{{tag}}}:"


def mark_key(tag: str) -> str:
    """Return the key of a tag's mark (relaxd.redis_client.client), which is not under its prefix: it outlives a run."""
    return f"relaxd:acknowledged:{{{tag}}}"


def slot_of(tag: str) -> int:
    """Return the slot of a tag's keys in a Redis Cluster."""
    return int(key_slot(key_prefix(tag).encode()))
