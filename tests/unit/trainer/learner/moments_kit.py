"""What the tests of AdamWs with small moments share."""

from typing import Any

import torch
from torch import Tensor

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.05}


def gradients(count: int, size: int) -> list[Tensor]:
    """Return gradients [size] of so many updates, with noise around a mean."""
    torch.manual_seed(1)
    return [torch.randn(size) * 0.1 + torch.linspace(-1, 1, size) for _ in range(count)]
