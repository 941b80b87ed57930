"""Seeds derived from others and from names, and seeding of libraries with one generator per process."""

import hashlib
import threading

SEEDS = 1 << 32
"""Number of different seeds that libraries accept: they also seed numpy, which accepts 0 to 2**32 - 1."""
seeding = threading.Lock()
"""Lock for libraries' global generators: held while a conversation seeds them and draws its first state, so that no
other conversation draws in between."""


def seed_of(*parts: int | str) -> int:
    """Derive a 63-bit seed from parts such as the run's seed and a group's id; the same parts give the same seed."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
