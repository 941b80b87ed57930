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
"""Dense bf16 FLOP/s of a GPU on an SXM board, by a word of its name; GPUs on other boards are slower."""


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s, for instance of "NVIDIA H100 80GB HBM3"; None if unknown."""
    words = re.split(r"[\s-]+", device_name)
    if "PCIe" in words or "NVL" in words:
        return None
    return next((peak for word, peak in PEAK_FLOPS.items() if word in words), None)


def training_flops(shape: ModelShape, tokens: float, trained: float, attended: float) -> float:
    """Return the FLOPs of forward and backward passes: a third of them are the forward passes'.

    They are 6 for each parameter that a token uses, the output layer's only for trained tokens, 12 x heads x head size
    for each layer with attention and pair of tokens, and `state_flops`. Recomputation isn't counted.

    Args:
        shape: the model.
        tokens: tokens, each prompt that sequences share counted once.
        trained: tokens that are trained.
        attended: pairs of tokens of which one attends to the other.
    """
    output = shape.vocabulary * shape.hidden
    of_layers = 6.0 * (used_parameters(shape) - output) * tokens
    of_attention = 12.0 * shape.attention_layers * shape.query * attended
    return of_layers + 6.0 * output * trained + of_attention + state_flops(shape) * tokens


def state_flops(shape: ModelShape) -> float:
    """Return the FLOPs per token for the states of gated delta nets: each number is read twice and written once."""
    sizes = shape.delta_net
    return 18.0 * sum(sizes.layers) * sizes.values * sizes.key_size if sizes is not None else 0.0
