"""A reward that differs between the samples of a random model, and takes its time: faults find work under way."""

import time
from typing import Any

SECONDS = 0.04


def even_bytes(sample: Any) -> dict[str, float]:
    time.sleep(SECONDS)
    data = sample.response.encode()
    return {"reward": sum(byte % 2 == 0 for byte in data) / max(len(data), 1)}
