"""The reward of a rehearsal."""

import hashlib
import time

from relaxd.rewards.interface import RewardInput


def scripted(sample: RewardInput, success: float = 0.5, seconds: float = 0.0) -> float:
    """Return 1 for a share `success` of the samples and 0 for the others, after `seconds`."""
    if seconds:
        time.sleep(seconds)
    # Texts of one length are equal in a rehearsal, so chance comes from here.
    digest = hashlib.blake2b(f"{sample.prompt}/{len(sample.response)}/{time.monotonic_ns()}".encode(), digest_size=4)
    return float(int.from_bytes(digest.digest(), "little") < success * 2**32)
