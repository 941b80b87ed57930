"""Floating-point operations that training a model needs, and how many a GPU can do."""

import re
from collections.abc import Mapping

from relaxd.models.layouts import used_parameters
from relaxd.models.shape import ModelShape

PEAK_FLOPS: Mapping[str, float] = {
    "A100": 312e12,
    "A800": 312e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Dense bf16 FLOP/s of a GPU on an SXM board, by a word of its name; other boards have less."""


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s, such as of "NVIDIA H100 80GB HBM3"; None if it isn't known."""
    words = re.split(r"[\s-]+", device_name)
    if "PCIe" in words or "NVL" in words:
        return None
    return next((peak for word, peak in PEAK_FLOPS.items() if word in words), None)


def training_flops(shape: ModelShape, tokens: float, trained: float, attended: float) -> float:
    """Return the FLOPs of forward and backward passes: a third of them are the forward passes'.

    They are 6 for each parameter that a token uses, the output layer's only for trained tokens, and 12 x heads x head
    size for each layer and pair of tokens. Recomputation isn't counted.

    Args:
        shape: the model.
        tokens: tokens, each prompt that sequences share counted once.
        trained: tokens that are trained.
        attended: pairs of tokens of which one attends to the other.
    """
    output = shape.vocabulary * shape.hidden
    of_layers = 6.0 * (used_parameters(shape) - output) * tokens
    return of_layers + 6.0 * output * trained + 12.0 * shape.layers * shape.query * attended
