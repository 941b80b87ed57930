"""Seeds that follow from others and from names, the same in every process."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends only on the parts, such as run seed and group id."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
