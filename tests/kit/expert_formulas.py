"""Mixture of experts as its formula says, expert after expert in float64, and loads to try it on."""

import torch
import torch.nn.functional as functional
from torch import Tensor

EXPERTS, TOP_K = 8, 2
LOADS = ("even", "skewed", "idle experts", "one expert", "one token")


def choose(load: str, tokens: int, seed: int = 0) -> Tensor:
    """Experts [T, TOP_K] of tokens (of one, for "one token") under a load."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 1 if load == "one token" else tokens
    shares = {
        "skewed": torch.tensor([100.0, 10, 3, 1, 1, 0.1, 0.1, 0.1]),
        "idle experts": torch.tensor([0.0, 1, 1, 0, 0, 1, 1, 0]),
    }.get(load, torch.ones(EXPERTS))
    if load == "one expert":  # twice, as no router would, but an engine's report may
        return torch.full((tokens, TOP_K), 5)
    return torch.multinomial(shares.expand(tokens, EXPERTS), TOP_K, generator=generator)


def mixture(x: Tensor, weights: Tensor, experts: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """The weighted sum of each token's experts.

    Args:
        x: [T, hidden].
        weights: [T, K].
        experts: [T, K].
        fc1: [E, 2, ffn, hidden].
        fc2: [E, hidden, ffn].
    """
    output = torch.zeros_like(x)
    for expert in range(len(fc1)):
        chosen = (weights * (experts == expert)).sum(1, keepdim=True)
        gate, up = x @ fc1[expert, 0].t(), x @ fc1[expert, 1].t()
        output = output + chosen * ((functional.silu(gate) * up) @ fc2[expert].t())
    return output
