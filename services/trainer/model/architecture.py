"""The trainer's view of a model: its sizes and switches, independent of Hugging Face's names for them."""

from dataclasses import dataclass

from relaxd.models.shape import DeltaNetSizes
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from services.trainer.model.rope import Rope


class ModelError(InvalidArgument):
    """The trainer can't use a model, at any start."""


class ModelFileError(FailedPrecondition):
    """A file of a model folder is missing or unreadable at the moment, for instance on an unreachable file system."""


@dataclass(frozen=True)
class ExpertArchitecture:
    """The mixture-of-experts part of a model."""

    count: int
    """Experts per layer."""
    per_token: int
    """Number of experts per token."""
    ffn_size: int
    """Inner width of one expert."""
    normalize: bool
    """True if the chosen experts' weights are normalised to add up to 1."""
    shared_ffn_size: int | None
    """Inner width of the gated expert shared by all tokens; None if there is none."""


VISUAL, AUDIO_TOWER = "visual", "audio_tower"
"""Names of towers, which are those of Hugging Face's modules."""


@dataclass(frozen=True)
class TowerArchitecture:
    """A tower, which converts media to rows as wide as the decoder's: transformers' module."""

    name: str
    """VISUAL or AUDIO_TOWER."""
    prefix: str
    """Beginning of the names of its tensors in Hugging Face's files."""
    source: str
    """Name of its class in transformers."""
    config: str
    """Section of the tower in config.json, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of a decoder-only model, with its towers if it has any."""

    model_type: str
    """Hugging Face's name of the family."""
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_size: int
    """Inner width of a dense MLP."""
    layers: int
    """Transformer layers."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_size: int
    """Width of a head."""
    norm_epsilon: float
    """RMSNorm's epsilon."""
    max_positions: int
    """Maximum sequence length that the model supports."""
    tied_embeddings: bool
    """True if the output layer is the embedding."""
    rope: Rope
    """Rotary embedding."""
    qk_norm: bool = False
    """True if queries and keys are normalised per head."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases."""
    output_bias: bool = False
    """True if attention's output projection has a bias."""
    experts: ExpertArchitecture | None = None
    """Mixture of experts, or None for a dense model."""
    window: int | None = None
    """Number of tokens that a token of a `windowed` layer attends to, itself included; None without such layers."""
    windowed: tuple[bool, ...] = ()
    """True if each layer's attention is limited to `window`; empty if `window` is None."""
    output_gate: bool = False
    """True if attention's output is multiplied by the sigmoid of a gate."""
    zero_centred_norms: bool = False
    """True if norms multiply by 1 + weight."""
    delta_net: DeltaNetSizes | None = None
    """Gated delta nets in place of attention in some layers; None: all layers have attention."""
    towers: tuple[TowerArchitecture, ...] = ()
    """Towers; none of a model of text."""
