"""How far the engine's log-probs are from the trainer's: measures that add up over micro-batches and ranks.

A measure is float64 [2, 4 + BINS]; row 0 is about the compared tokens (written under the trainer's very weights), row 1
about all trained ones. Columns: the largest |l|, the number of tokens, the sum of |l|, the sum of k3, and how many |l|
fall into each bin, with l = log p_trainer - log p_engine.
"""

import math

import torch
from torch import Tensor

SMALLEST = 2.0**-27
"""Differences below it (7e-9) count as none: float32 has no smaller ones where log-probs are more than 0.1."""
OCTAVES = 34
PER_OCTAVE = 16
BINS = 1 + OCTAVES * PER_OCTAVE
"""Bin 0 is below SMALLEST; each other one is a sixteenth of an octave, 4.4 % wide; the last one is open."""
MAX_LOG_RATIO = 20.0
"""k3 is that of log-ratios clamped to ±this, as in verl: one token cannot make it infinite."""


def measure(logprobs: Tensor, rollout_logprobs: Tensor, logprobs_comparable: Tensor) -> Tensor:
    """The measure of some trained tokens, on their device and without waiting for it.

    k3 = exp(l) - 1 - l estimates KL(engine || trainer) from the engine's samples (Schulman 2020, "Approximating KL
    divergence"): each is at least 0, and their mean is unbiased.

    Args:
        logprobs: float32 [N], the trainer's.
        rollout_logprobs: float32 [N], the engine's.
        logprobs_comparable: [N], not 0 where the trainer has the weights that the engine had.
    """
    log_ratio = (logprobs.detach() - rollout_logprobs).double()
    size = log_ratio.abs()
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = clamped.expm1() - clamped
    # float32 would round where a bin ends.
    bins = ((size.clamp(min=SMALLEST / 2) / SMALLEST).log2() * PER_OCTAVE).floor().long().clamp(-1, BINS - 2) + 1
    ones = torch.ones_like(size)
    rows = []
    for chosen in ((logprobs_comparable != 0).double(), ones):
        of_chosen = size * chosen
        # `max` of no tokens is an error: one more, of 0.
        largest = torch.cat([of_chosen, of_chosen.new_zeros(1)]).max()
        sums = torch.stack([largest, chosen.sum(), of_chosen.sum(), (k3 * chosen).sum()])
        rows.append(torch.cat([sums, sums.new_zeros(BINS).index_add(0, bins, chosen)]))
    return torch.stack(rows)


def merge(one: Tensor, other: Tensor) -> Tensor:
    """The measure of both's tokens."""
    total = one + other
    total[:, 0] = torch.maximum(one[:, 0], other[:, 0])
    return total


def metrics(measured: Tensor) -> dict[str, float]:
    """The step metrics: logprob_difference of the compared tokens, policy_drift of all; absent where there are none."""
    found = {}
    for name, row in zip(("logprob_difference", "policy_drift"), measured.cpu(), strict=True):
        largest, tokens, difference, k3 = row[:4].tolist()
        if tokens:
            found[name] = difference / tokens
            found[f"{name}_p99"] = min(_quantile(row[4:], 0.99), largest)
            found[f"{name}_max"] = largest
            found[f"{name}_kl"] = k3 / tokens
    return found


def _quantile(counts: Tensor, share: float) -> float:
    """The middle of the bin where so many of the tokens are reached: 2.2 % off at most."""
    reached = counts.cumsum(0)
    place = int(torch.searchsorted(reached, share * float(reached[-1])))
    return SMALLEST * math.exp2((place - 0.5) / PER_OCTAVE) if place else 0.0
