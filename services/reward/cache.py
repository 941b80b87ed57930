"""Cache of scores by sample content, for deterministic rewards."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, replace

from relaxd.rewards import RewardInput, RewardOutput
from services.reward.worker_pool import Failure

Scored = list[RewardOutput | Failure]
Score = Callable[[Sequence[RewardInput]], Awaitable[Scored]]
"""Function that scores samples of one prompt, in order."""


class ScoreCache:
    """Scores of the most recently scored samples. Failures aren't stored."""

    def __init__(self, size: int) -> None:
        """`size`: number of scores to remember; 0: none."""
        self._size = size
        self._scores: OrderedDict[bytes, RewardOutput] = OrderedDict()
        self.hits = 0
        """Number of samples whose score was in the cache, equal samples of one group included."""

    def clear(self) -> None:
        """Forget every score, because the reward may have been changed."""
        self._scores = OrderedDict()  # calls in progress keep the old one

    async def score(self, samples: Sequence[RewardInput], score: Score) -> Scored:
        """Return the scores of samples of one prompt; `score` computes the unknown ones, each once."""
        if not self._size:
            return await score(samples)
        scores = self._scores
        keys = [_key(sample) for sample in samples]
        found: dict[bytes, RewardOutput | Failure] = {}
        for key in keys:
            if key in scores:
                scores.move_to_end(key)
                found[key] = scores[key]
        unknown = {key: sample for key, sample in zip(keys, samples, strict=True) if key not in found}
        self.hits += len(samples) - len(unknown)
        if unknown:
            found |= zip(unknown, await score(list(unknown.values())), strict=True)
        for key in unknown:
            if isinstance(outcome := found[key], RewardOutput):
                scores[key] = outcome
        while len(scores) > self._size:
            scores.popitem(last=False)
        return [found[key] for key in keys]


def _key(sample: RewardInput) -> bytes:
    """Return the digest of a reward's whole input. Messages contain hashes of images."""
    described = astuple(replace(sample, media={}))
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()
