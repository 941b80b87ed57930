"""Mixtures: compute how often an epoch visits the prompts of each source."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relaxd.config import DataConfig


@dataclass(frozen=True)
class Share:
    """A source in a mixture."""

    count: int
    """Its prompts."""
    weight: float = 1.0
    """Number of times that an epoch visits each of them."""

    @property
    def visits(self) -> int:
        """Visits of an epoch to the source, at least one."""
        return max(1, round(self.count * self.weight))


def mixture_weights(data: DataConfig, counts: Sequence[int]) -> list[float]:
    """Return the number of times that an epoch visits each prompt of the sources, given their sizes.

    With data.temperature T an epoch has N * n**(1/T) / sum of all n**(1/T) visits to a source of n prompts, N of all
    (Arivazhagan et al. 2019, arXiv 1907.05019).
    """
    if data.temperature is None:
        return [one.weight for one in data.sources] or [1.0] * len(counts)
    sizes = np.array(counts, np.float64)
    powers = (sizes / sizes.max()) ** (1 / data.temperature)  # of shares, because those of counts may be too large
    return list((sizes.sum() * powers / powers.sum() / sizes).tolist())


def epoch_visits(shares: Sequence[Share], epoch: int, seed: int) -> np.ndarray:
    """Return the indices of the prompts that an epoch visits, source by source, int32 [sum of visits].

    They are int64 if there are more than 2^31 - 1 prompts.

    A source is visited in rounds through all its prompts, which go on from epoch to epoch, so that a weight of 0.5
    reaches every prompt in two epochs. The order of a source's rounds depends on the seed alone.
    """
    kind = np.int32 if sum(share.count for share in shares) < 2**31 else np.int64
    parts, first = [], 0
    for number, share in enumerate(shares):
        if share.visits == share.count:
            parts.append(np.arange(first, first + share.count, dtype=kind))
        else:
            start = epoch * share.visits
            visits = np.arange(start, start + share.visits, dtype=np.int64) % share.count
            if share.visits % share.count:
                visits = np.random.default_rng((seed, number)).permutation(share.count)[visits]
            parts.append((first + visits).astype(kind))
        first += share.count
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
