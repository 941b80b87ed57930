"""A reward that can't be learned, so every step changes the weights, and takes its time, so faults find work."""

import time
import zlib
from typing import Any

SECONDS = 0.04


def arbitrary(sample: Any) -> dict[str, float]:
    time.sleep(SECONDS)
    return {"reward": zlib.crc32(sample.response.encode()) / 2**32}
