"""Floating-point operations of training a model, and the peak rates of GPUs."""

import re
from collections.abc import Mapping

from relaxd.models.layouts import used_parameters
from relaxd.models.shape import AudioShape, ModelShape, VisionShape

PEAK_FLOPS: Mapping[str, float] = {
    "A100": 312e12,
    "A800": 312e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Dense bf16 FLOP/s of a GPU on an SXM board, by a word of the GPU's name. GPUs on other boards are slower."""
SOUND_CHUNK = (50, 25, 13)
"""Number of spectrogram frames to which each convolution of an audio tower reduces one second of sound (100 frames).
The last number is the number of tokens."""
SOUND_WINDOW = 104
"""Number of tokens in an attention window of the audio tower; they stand for 800 spectrogram frames."""


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s, for instance of "NVIDIA H100 80GB HBM3"; None if unknown."""
    words = re.split(r"[\s-]+", device_name)
    if "PCIe" in words or "NVL" in words:
        return None
    return next((peak for word, peak in PEAK_FLOPS.items() if word in words), None)


def training_flops(shape: ModelShape, tokens: float, trained: float, attended: float) -> float:
    """Return the FLOPs of forward and backward passes. A third of them are for the forward passes.

    Per token: 6 per parameter that it uses, the output layer's only if it is trained; 12 x heads x head size per
    attention layer and token that it attends to; and `state_flops`. Recomputation isn't counted.

    Args:
        shape: the model.
        tokens: number of tokens; a prompt that sequences share counts once.
        trained: number of trained tokens.
        attended: number of pairs of tokens of which one attends to the other.
    """
    output = shape.vocabulary * shape.hidden
    of_layers = 6.0 * (used_parameters(shape) - output) * tokens
    of_attention = 12.0 * shape.attention_layers * shape.query * attended
    return of_layers + 6.0 * output * trained + of_attention + state_flops(shape) * tokens


def state_flops(shape: ModelShape) -> float:
    """Return the training FLOPs per token for the states of gated delta nets. Each number of a state is read twice and
    written once."""
    sizes = shape.delta_net
    return 18.0 * sum(sizes.layers) * sizes.values * sizes.key_size if sizes is not None else 0.0


def vision_flops(tower: VisionShape, tokens: float) -> float:
    """Return the FLOPs of a vision tower's forward pass over `tokens` tokens, which stand for an image or for one time
    of a video."""
    hidden, merged, patches = tower.hidden, tower.hidden * tower.merge**2, tokens * tower.merge**2
    of_patch = tower.patch_values * hidden + tower.layers * (4 * hidden**2 + 2 * hidden * tower.ffn)
    of_attention = 4.0 * tower.layers * hidden * patches**2
    mergers = (1 + tower.deepstack) * (merged**2 + merged * tower.output)
    return 2.0 * of_patch * patches + of_attention + 2.0 * mergers * tokens


def audio_flops(tower: AudioShape, tokens: float) -> float:
    """Return the FLOPs of an audio tower's forward pass over a sound of `tokens` tokens in whole chunks and windows.

    The FLOPs grow in proportion to the tokens, because attention is within windows.
    """
    hidden, channels = tower.hidden, tower.channels
    bands = [-(-tower.bands // 2**layer) for layer in (1, 2, 3)]
    convolved = [9 * length * width for length, width in zip(SOUND_CHUNK, bands, strict=True)]
    of_chunk = convolved[0] * channels + sum(convolved[1:]) * channels**2
    of_token = of_chunk / SOUND_CHUNK[-1] + channels * bands[-1] * hidden
    of_token += tower.layers * (4 * hidden**2 + 2 * hidden * tower.ffn) + hidden**2 + hidden * tower.output
    return (2.0 * of_token + 4.0 * tower.layers * hidden * SOUND_WINDOW) * tokens
