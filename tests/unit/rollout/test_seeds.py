"""Seeds that follow from others."""

import hashlib

from relaxd.seeds import seed_of


def test_seeds_follow_from_their_parts() -> None:
    digest = hashlib.blake2b(b"7/0-000001", digest_size=8).digest()
    assert seed_of(7, "0-000001") == int.from_bytes(digest, "little") >> 1  # as in records of earlier runs
    assert len({seed_of(7, "a"), seed_of(8, "a"), seed_of(7, "b"), seed_of(7, "a", 0), seed_of(7)}) == 5
    assert 0 <= seed_of("x") < 2**63
