"""Normalisation of advantages over all trained tokens of a step: REINFORCE++, arXiv 2501.03262."""

from collections.abc import Sequence
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

    @classmethod
    def of(cls, advantages: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.uint8]]) -> "Whitening":
        """Measure a step, in float64 and in the order of its groups.

        The variance is that of the population (divisor: the number of tokens), and at least 1e-8.

        Args:
            advantages: [T] of each group.
            masks: [T] of each group; tokens with mask 0 don't count.
        """
        trained = [values[mask != 0].astype(np.float64) for values, mask in zip(advantages, masks, strict=True)]
        everything = np.concatenate(trained) if trained else np.zeros(0)
        if everything.size == 0:
            return cls(0.0, 1.0)
        return cls(float(everything.mean()), float(np.sqrt(max(float(everything.var()), 1e-8))))

    def apply(self, advantages: NDArray[np.float32], mask: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return (A - mean) / deviation of a group's tokens, float32 [T], 0 where mask is 0."""
        normalized = (advantages.astype(np.float64) - self.mean) / self.deviation
        return np.where(mask != 0, normalized, 0.0).astype(np.float32)
