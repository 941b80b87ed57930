"""A reward that differs between the samples of a random model."""

from typing import Any


def even_bytes(sample: Any) -> dict[str, float]:
    data = sample.response.encode()
    return {"reward": sum(byte % 2 == 0 for byte in data) / max(len(data), 1)}
