"""Seeds derived from others and from names, and seeding of libraries with one generator per process."""

import hashlib
import threading

SEEDS = 1 << 32
"""Number of seeds that libraries accept: they also seed numpy, which accepts 0 to 2**32 - 1."""
seeding = threading.Lock()
"""Lock held while a conversation is seeded and draws its first state, so that no other one draws in between."""


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits, the same in every process, of parts such as run seed and group id."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
