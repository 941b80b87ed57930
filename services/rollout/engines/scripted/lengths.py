"""Lengths of a rehearsal's answers: log-normal, with a long tail that max_new_tokens cuts off."""

import numpy as np
from numpy.typing import NDArray

from relaxd.config import RehearsalConfig


def draw_lengths(config: RehearsalConfig, n: int, max_new_tokens: int, seed: int) -> NDArray[np.int64]:
    """Return the lengths of n answers, int64 [n], each 1 to max_new_tokens. The same seed gives the same lengths."""
    median = config.median_tokens or max(1, max_new_tokens // 8)
    drawn = median * np.exp(config.spread * np.random.default_rng(seed).standard_normal(n))
    return np.clip(np.rint(drawn), 1, max_new_tokens).astype(np.int64)
