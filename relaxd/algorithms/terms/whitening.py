"""Normalisation of advantages over all trained tokens of a step: REINFORCE++, arXiv 2501.03262."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Whitening:
    """Mean and standard deviation of a step's advantages.

    Two numbers, so that one rank can compute them and a step file can record them: applying them again gives the same
    bits.
    """

    mean: float
    deviation: float
    """0 if one of the advantages isn't finite: then no normalised one is, and no update is applied."""

    @classmethod
    def of(cls, advantages: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.uint8]]) -> "Whitening":
        """Measure a step, in float64. The order of its groups doesn't matter, not even for the last bit.

        The variance is that of the population (divisor: the number of tokens), and at least 1e-8.

        Args:
            advantages: [T] of each group.
            masks: [T] of each group; tokens with mask 0 don't count.
        """

        def total(term: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> float:
            # Group by group: a step may have a hundred million tokens. fsum rounds once, in whatever order.
            sums = [
                float(term(values[mask != 0].astype(np.float64)).sum())
                for values, mask in zip(advantages, masks, strict=True)
            ]
            return math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan

        count = sum(int(np.count_nonzero(mask)) for mask in masks)
        if count == 0:
            return cls(0.0, 1.0)
        mean = total(lambda values: values) / count
        if not math.isfinite(mean):
            return cls(0.0, 0.0)
        variance = total(lambda values: np.square(values - mean)) / count
        return cls(mean, math.sqrt(max(variance, 1e-8)))

    def apply(self, advantages: NDArray[np.float32], mask: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return (A - mean) / deviation of some tokens, float32 [T], 0 where mask is 0."""
        normalized = (advantages.astype(np.float64) - self.mean) / (self.deviation or math.nan)
        return np.where(mask != 0, normalized, 0.0).astype(np.float32)
