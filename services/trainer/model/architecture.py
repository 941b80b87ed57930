"""The trainer's description of a model: sizes and switches, independent of Hugging Face's names for them, and rotary
position embedding (RoFormer, arXiv 2104.09864) with the scalings to longer contexts, as in transformers.

A family of models is one file in services/trainer/model/architectures, named after its `model_type`, which reads the
family's config.json into an `Architecture`. To add a family, add such a file; docs/models.md says how.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from relaxd.models.shape import DeltaNetSizes
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from services.trainer.transformer.heads import Rotary


class ModelError(InvalidArgument):
    """The trainer can't use this model; a restart doesn't help."""


class ModelFileError(FailedPrecondition):
    """A model folder's file is missing or can't be read now, for instance because the file system is unreachable."""


@dataclass(frozen=True)
class Rope:
    """Parameters of a model's rotary position embedding."""

    theta: float
    """Base of the rotary frequencies."""
    scaling: str = "default"
    """Scaling to longer contexts: a key of `SCALINGS`."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the scaling, named as in transformers."""
    share: float = 1.0
    """Rotated share of each head's width, from its beginning (`partial_rotary_factor`)."""
    sections: tuple[int, ...] = ()
    """Numbers of frequencies for time, row and column in M-RoPE (Qwen2-VL, arXiv 2409.12191), interleaved as in
    Qwen3-VL; empty: positions have one axis."""

    def rotated(self, head_size: int) -> int:
        """Return the width of the rotated part of a head."""
        return int(head_size * self.share)

    def rotary(self, head_size: int) -> Rotary:
        """Return the rotary embedding of heads of `head_size`: float32 frequencies on the CPU, and the scale."""
        size = self.rotated(head_size)
        found = SCALINGS[self.scaling](self, size)
        if not self.sections:
            return found
        axes = torch.zeros(size // 2, dtype=torch.int64)  # time, row, column, time, row, ... time
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return found._replace(axes=axes)


def read_rope(config: dict[str, Any], *, partial: bool = False) -> Rope:
    """Read a config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older releases).

    Args:
        config: the config.json.
        partial: True if the family may rotate only a part of each head.

    Raises:
        ModelError: the scaling isn't supported or lacks a parameter.
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in found.values()):
        raise ModelError(f"rope_parameters differ by layer type ({', '.join(found)}): only one for all is supported")
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    old_name = found.pop("type", "default")
    scaling = found.pop("rope_type", old_name)
    share = found.pop("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if share != 1.0 and not partial:
        raise ModelError(f"partial_rotary_factor is {share}: only 1.0 is supported (all of a head is rotated)")
    if scaling not in SCALINGS:
        hint = (
            "; its frequencies change with a sequence's length. Up to max_position_embeddings "
            f'({config["max_position_embeddings"]} tokens) "default" is the same'
            if scaling == "dynamic"
            else ""
        )
        supported = ", ".join(f'"{name}"' for name in SCALINGS)
        raise ModelError(f'rope_type is "{scaling}": supported are {supported}{hint}')
    if scaling in ("llama3", "yarn"):
        trained = config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
        found["original_max_position_embeddings"] = trained or config["max_position_embeddings"]
    if scaling == "yarn" and found.get("factor") is None:
        found["factor"] = config["max_position_embeddings"] / found["original_max_position_embeddings"]
    missing = [name for name in _NEEDED[scaling] if found.get(name) is None]
    if missing:
        raise ModelError(f'rope_type "{scaling}" needs {" and ".join(missing)}')
    return Rope(float(theta), scaling, found, float(share))


_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def _default(rope: Rope, size: int) -> Rotary:
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return Rotary(1.0 / (rope.theta**exponents))


def _linear(rope: Rope, size: int) -> Rotary:
    """Position interpolation (arXiv 2306.15595): divide all frequencies by the scaling factor."""
    return Rotary(_default(rope, size).frequencies / rope.parameters["factor"])


def _llama3(rope: Rope, size: int) -> Rotary:
    """Divide low frequencies by the scaling factor, as Llama 3.1 does (arXiv 2407.21783, section 3.4)."""
    given, frequencies = rope.parameters, _default(rope, size).frequencies
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    share = ((given["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    return Rotary((1 - share) * frequencies / given["factor"] + share * frequencies)


def _yarn(rope: Rope, size: int) -> Rotary:
    """YaRN (arXiv 2309.00071, section 3): interpolate low frequencies, keep high ones, scale attention scores."""
    given, frequencies = rope.parameters, _default(rope, size).frequencies
    factor, trained = given["factor"], given["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """Return the dimension whose angle makes `rotations` full turns over the original context length."""
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    scaled = interpolated * frequencies / factor + (1 - interpolated) * frequencies
    return Rotary(scaled, _yarn_score_scale(given))


def _yarn_score_scale(given: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)


SCALINGS: dict[str, Callable[[Rope, int], Rotary]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Functions that compute a rotary embedding from its parameters and the rotated width of a head, by the scaling's name
in transformers."""


@dataclass(frozen=True)
class ExpertArchitecture:
    """Sizes and switches of a model's mixture of experts."""

    count: int
    """Experts per layer."""
    per_token: int
    """Number of experts that each token is routed to."""
    ffn_size: int
    """Inner width of one expert's MLP."""
    normalize: bool
    """True if the chosen experts' weights are normalised to add up to 1."""
    shared_ffn_size: int | None
    """Inner width of the gated expert shared by all tokens; None if there is none."""


VISUAL, AUDIO_TOWER = "visual", "audio_tower"
"""Hugging Face's names of the vision tower (images and videos) and the audio tower."""


@dataclass(frozen=True)
class TowerArchitecture:
    """A tower: transformers' module that converts media to rows as wide as the decoder's hidden states."""

    name: str
    """Kind of the tower: VISUAL or AUDIO_TOWER."""
    prefix: str
    """Prefix of the tower's tensor names in Hugging Face's files."""
    source: str
    """Name of the tower's class in transformers."""
    config: str
    """The tower's section of config.json, as JSON text."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of a decoder-only model, with its towers if it has any."""

    model_type: str
    """Hugging Face's `model_type`, the name of the model family."""
    vocab_size: int
    """Vocabulary size: number of rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_size: int
    """Inner width of a dense MLP."""
    layers: int
    """Number of transformer layers."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key-value heads."""
    head_size: int
    """Width of an attention head."""
    norm_epsilon: float
    """Epsilon of the RMSNorms."""
    max_positions: int
    """Maximum sequence length that the model supports."""
    tied_embeddings: bool
    """True if the output layer shares the embedding's weights."""
    rope: Rope
    """Rotary position embedding."""
    qk_norm: bool = False
    """True if queries and keys are normalised per head."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases."""
    output_bias: bool = False
    """True if attention's output projection has a bias."""
    experts: ExpertArchitecture | None = None
    """Mixture of experts, or None for a dense model."""
    window: int | None = None
    """Sliding window of `windowed` layers, in tokens, with the attending token; None without such layers."""
    windowed: tuple[bool, ...] = ()
    """For each layer, True if its attention is limited to `window`; empty if `window` is None."""
    output_gate: bool = False
    """True if a sigmoid gate multiplies attention's output."""
    zero_centred_norms: bool = False
    """True if RMSNorms multiply by 1 + weight instead of weight."""
    delta_net: DeltaNetSizes | None = None
    """Sizes of the gated delta nets that replace attention in some layers; None: all layers have attention."""
    towers: tuple[TowerArchitecture, ...] = ()
    """Vision and audio towers; empty for a text model."""
