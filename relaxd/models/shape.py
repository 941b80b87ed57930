"""A model's sizes and variants, read from config.json without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.models import DataError
from relaxd.models.model_contradictions import config_contradiction
from relaxd.text import parse_json

Config = Mapping[str, Any]
"""Contents of a model's config.json, or of a section in it."""


def expert_dtype(experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype of expert ids (column ROUTED_EXPERTS) for a model with `experts` experts per layer."""
    return np.dtype(np.uint8 if experts <= 1 << 8 else np.uint16)


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of the mixture of experts in each layer."""

    count: int
    """Number of experts per layer."""
    per_token: int
    """Number of experts that each token uses in a layer."""
    ffn: int
    """Inner width of an expert's MLP."""
    shared_ffn: int
    """Inner width of the gated expert that all tokens of a layer use; 0 if there is none."""


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of a vision tower. Each rank of the first pipeline stage holds all of it."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    patch_values: int
    """Number of input values per patch: channels x temporal patch size x pixels of a patch."""
    positions: int
    """Number of rows in the vision tower's table of position embeddings."""
    merge: int
    """Number of patches along each side of the square that one token covers."""
    deepstack: int
    """Number of decoder layers, from the first, to which the vision tower adds outputs."""
    output: int
    """Width of the vision tower's output for a token."""

    @property
    def parameters(self) -> int:
        """Number of the vision tower's parameters."""
        hidden, merged = self.hidden, self.hidden * self.merge**2
        layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * self.ffn + self.ffn + hidden + 4 * hidden
        merger = merged * merged + merged + merged * self.output + self.output
        embeddings = (self.patch_values + 1 + self.positions) * hidden
        return embeddings + self.layers * layer + merger + 2 * hidden + self.deepstack * (merger + 2 * merged)


@dataclass(frozen=True, kw_only=True)
class AudioShape:
    """Sizes of an audio tower. Each rank of the first pipeline stage holds all of it."""

    layers: int
    hidden: int
    ffn: int
    bands: int
    """Number of frequency bands of a sound's spectrogram."""
    channels: int
    """Number of channels of the audio tower's convolutions."""
    output: int
    """Width of the audio tower's output for a token."""

    @property
    def parameters(self) -> int:
        """Number of the audio tower's parameters."""
        hidden, channels = self.hidden, self.channels
        convolutions = 10 * channels + 2 * (9 * channels + 1) * channels + channels * -(-self.bands // 8) * hidden
        layer = 4 * (hidden + 1) * hidden + 2 * hidden * self.ffn + self.ffn + hidden + 4 * hidden
        projection = (hidden + 1) * (hidden + self.output)
        return convolutions + self.layers * layer + 2 * hidden + projection


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """Sizes of a model's gated delta nets, and the layers that have one."""

    layers: tuple[bool, ...]
    """For each layer, True if it has a gated delta net instead of attention."""
    key_heads: int
    """Number of heads of queries and keys in a gated delta net."""
    value_heads: int
    """Number of heads of values in a gated delta net: a multiple of `key_heads`."""
    key_size: int
    """Width of one head's query or key in a gated delta net."""
    value_size: int
    """Width of one head's value in a gated delta net."""
    convolution: int
    """Number of tokens that the convolution reads for each token, the token itself included."""

    @property
    def keys(self) -> int:
        """Width of the keys of all heads in a gated delta net; the queries have the same width."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Width of the values of all heads in a gated delta net."""
        return self.value_heads * self.value_size

    @property
    def projected(self) -> int:
        """Width of a gated delta net's input projection: queries, keys, values, gates, strengths and decays."""
        return 2 * self.keys + 2 * self.values + 2 * self.value_heads

    def parameters(self, hidden: int, ranks: int) -> int:
        """Return the number of parameters that each of `ranks` tensor-parallel ranks holds of one gated delta net."""
        divided = (self.projected + self.values) * hidden + (2 * self.keys + self.values) * self.convolution
        return (divided + 2 * self.value_heads) // ranks + self.value_size


def read_delta_net(config: Mapping[str, Any]) -> DeltaNetSizes:
    """Read the sizes of gated delta nets from a decoder's part of config.json.

    Raises:
        ValueError: a field is wrong.
    """
    count, interval = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    usual = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    types = config.get("layer_types") or usual
    if len(types) != count or set(types) - {"full_attention", "linear_attention"} or "full_attention" not in types:
        raise ValueError(
            f'layer_types is {types}: it must have "linear_attention" or "full_attention" for each of the {count} '
            'layers, and "full_attention" at least once'
        )
    sizes = {own: config.get(field, default) for own, (field, default) in _FIELDS.items()}
    for own, (field, _) in _FIELDS.items():
        if type(sizes[own]) is not int or sizes[own] < 1:
            raise ValueError(f"{field} is {sizes[own]!r}: it must be a whole number of at least 1")
    if sizes["value_heads"] % sizes["key_heads"]:
        raise ValueError(
            f"linear_num_value_heads is {sizes['value_heads']}: linear_num_key_heads, which is {sizes['key_heads']}, "
            "must divide it"
        )
    return DeltaNetSizes(layers=tuple(kind == "linear_attention" for kind in types), **sizes)


_FIELDS = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
    "convolution": ("linear_conv_kernel_dim", 4),
}
"""Name in config.json, and default in transformers, of each field of DeltaNetSizes."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and variants of a model: its decoder, and its towers if it has any."""

    model_type: str
    vocabulary: int
    hidden: int
    ffn: int
    """Inner width of a dense MLP, in layers without experts."""
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool
    """True if the output layer and the embedding are the same matrix."""
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    """True if attention's output projection has a bias."""
    experts: ExpertShape | None
    output_gate: bool = False
    """True if attention's output is multiplied by a gate, which has the width of the queries."""
    delta_net: DeltaNetSizes | None = None
    """Sizes of gated delta nets, which some layers have in place of attention; None if no layer has."""
    vision: VisionShape | None = None
    """Sizes of the vision tower; None if the model accepts no images."""
    audio: AudioShape | None = None
    """Sizes of the audio tower; None if the model accepts no sound."""

    @property
    def tower_parameters(self) -> int:
        """Number of parameters of the vision and audio towers together."""
        return sum(tower.parameters for tower in (self.vision, self.audio) if tower is not None)

    def has_delta_net(self, layer: int) -> bool:
        """Return True if a layer, numbered from 0, has a gated delta net in place of attention."""
        return self.delta_net is not None and self.delta_net.layers[layer]

    @property
    def attention_layers(self) -> int:
        """Number of layers that have attention, not a gated delta net."""
        return self.layers - (sum(self.delta_net.layers) if self.delta_net is not None else 0)

    @property
    def query(self) -> int:
        """Width of the queries of all heads together."""
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        """Width of the keys of all heads together; the values have the same width."""
        return self.kv_heads * self.head_size


def _both_biases(config: Config) -> dict[str, bool]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}


def _qk_norm(config: Config) -> dict[str, bool]:
    return {"qk_norm": True}


@dataclass(frozen=True)
class _Family:
    """Differences of the models of one `model_type` from Llama."""

    switches: Callable[[Config], dict[str, bool]] = lambda config: {}
    """Function of config.json that returns ModelShape's boolean fields by name. Fields that it leaves out are False."""
    kv_heads: int = 0
    """Default of num_key_value_heads in config.json; 0: the number of query heads."""
    head_size: int = 0
    """Default of head_dim in config.json; 0: the hidden size divided by the number of heads."""
    experts: bool = False
    shared: bool = False
    """True if each layer has an expert that all tokens share."""
    sees: bool = False
    """True if the model has a vision tower; then the decoder's fields are in `text_config`."""
    hybrid: bool = False
    """True if some layers have gated delta nets, and the others attention with an output gate."""
    deepstack: bool = True
    """False if the vision tower adds nothing to the decoder's first layers."""
    section: str = ""
    """Section of config.json that has the model's fields; empty: the top level."""


FAMILIES = {
    "llama": _Family(_both_biases),
    "qwen2": _Family(lambda config: {"qkv_bias": True}, kv_heads=32),
    "qwen3": _Family(lambda config: {"qk_norm": True, **_both_biases(config)}, kv_heads=32, head_size=128),
    "qwen3_vl": _Family(
        lambda config: {"qk_norm": True, **_both_biases(config)}, kv_heads=32, head_size=128, sees=True
    ),
    "qwen3_vl_moe": _Family(
        lambda config: {"qk_norm": True, **_both_biases(config)}, kv_heads=16, experts=True, sees=True
    ),
    "qwen3_omni_moe": _Family(
        lambda config: {"qk_norm": True, **_both_biases(config)},
        kv_heads=4,
        experts=True,
        sees=True,
        section="thinker_config",
    ),
    "qwen2_moe": _Family(lambda config: {"qkv_bias": bool(config.get("qkv_bias", True))}, experts=True, shared=True),
    "qwen3_moe": _Family(lambda config: {"qk_norm": True, **_both_biases(config)}, experts=True),
    "qwen3_next": _Family(_qk_norm, kv_heads=2, head_size=256, experts=True, shared=True, hybrid=True),
    "qwen3_5_text": _Family(_qk_norm, kv_heads=4, head_size=256, hybrid=True),
    "qwen3_5": _Family(_qk_norm, kv_heads=4, head_size=256, hybrid=True, sees=True, deepstack=False),
    "qwen3_5_moe_text": _Family(_qk_norm, kv_heads=2, head_size=256, experts=True, shared=True, hybrid=True),
    "qwen3_5_moe": _Family(
        _qk_norm, kv_heads=2, head_size=256, experts=True, shared=True, hybrid=True, sees=True, deepstack=False
    ),
    "mistral": _Family(kv_heads=8),
    "ministral": _Family(kv_heads=8),
    "phi3": _Family(),
}
"""Model families that the trainer supports (docs/models.md), by `model_type` in config.json."""
SEEING = tuple(name for name, family in FAMILIES.items() if family.sees)
"""Values of `model_type` whose models accept media."""


AUDIO_DEFAULTS: Config = {
    "encoder_layers": 32,
    "d_model": 1280,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "downsample_hidden_size": 480,
    "output_dim": 3584,
}
"""Defaults of the fields in `audio_config` of Qwen3-Omni's config.json."""
VISION_DEFAULTS: Config = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "spatial_merge_size": 2,
    "deepstack_visual_indexes": (8, 16, 24),
    "out_hidden_size": 3584,
}
"""Defaults of the fields in `vision_config` of Qwen3-VL's config.json."""


def read_shape(folder: Path, setting: str = "model.path") -> ModelShape:
    """Read a model folder's config.json.

    Raises:
        DataError: the file is missing or no JSON, a field is missing or wrong, or the family isn't supported. It names
            `setting`.
    """
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text())
        shape = _shape(config)
    except OSError as error:
        raise DataError(setting, f"{folder} has no readable config.json, as a model folder has: {error}") from error
    except KeyError as error:
        raise DataError(setting, f"{path} has no field {error}") from error
    except ValueError as error:
        raise DataError(setting, f"{path}: {error}") from error
    if problem := config_contradiction(config):
        raise DataError(setting, f"{path}: {problem}")
    return shape


def decoder_config(config: Config) -> Config:
    """Return the config.json fields of a model's decoder. Models for images have them in `text_config`."""
    if not sees(config):
        return config
    whole = config.get(FAMILIES[config["model_type"]].section, config)
    tied = whole.get("tie_word_embeddings", False)  # not the decoder's own field, as in transformers
    return {**whole, **whole["text_config"], "model_type": config["model_type"], "tie_word_embeddings": tied}


def sees(config: Config) -> bool:
    """Return True if the trainer supports media, at least images, for models with this config.json."""
    return config.get("model_type") in SEEING


def _shape(config: Config) -> ModelShape:
    if not isinstance(config, dict):
        raise ValueError(f"it must be a JSON object, not {type(config).__name__}")
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        nearest = get_close_matches(str(model_type), FAMILIES, n=1, cutoff=0)[0]
        raise ValueError(
            f'model_type is "{model_type}": supported are {", ".join(FAMILIES)}. The nearest name is "{nearest}"; '
            "see docs/models.md"
        )
    family = FAMILIES[model_type]
    whole = config[family.section] if family.section else config
    vision = _vision(whole["vision_config"], deepstack=family.deepstack) if family.sees else None
    audio = _audio(whole["audio_config"]) if "audio_config" in whole else None
    config = decoder_config(config)
    if family.experts:  # no layer has a dense MLP, and some configurations have no width of it
        config = {"intermediate_size": config["moe_intermediate_size"], **config}
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    kv_heads = heads
    if config.get("num_key_value_heads", family.kv_heads):
        kv_heads = _size({"num_key_value_heads": family.kv_heads, **config}, "num_key_value_heads")
    head_size = config.get("head_dim", family.head_size)
    return ModelShape(
        model_type=model_type,
        vocabulary=_size(config, "vocab_size"),
        hidden=hidden,
        ffn=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_size({"head_dim": head_size}, "head_dim") if head_size else hidden // heads,
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config, family) if family.experts else None,
        vision=vision,
        audio=audio,
        output_gate=family.hybrid,
        delta_net=read_delta_net(config) if family.hybrid else None,
        **{"qk_norm": False, "qkv_bias": False, "output_bias": False, **family.switches(config)},
    )


def _vision(config: Config, *, deepstack: bool) -> VisionShape:
    """Read the vision tower's sizes from `vision_config`. Missing fields have transformers' defaults."""
    config = {**VISION_DEFAULTS, **config}
    return VisionShape(
        layers=_size(config, "depth"),
        hidden=_size(config, "hidden_size"),
        ffn=_size(config, "intermediate_size"),
        heads=_size(config, "num_heads"),
        patch_values=_size(config, "in_channels") * _size(config, "temporal_patch_size") * config["patch_size"] ** 2,
        positions=_size(config, "num_position_embeddings"),
        merge=_size(config, "spatial_merge_size"),
        deepstack=len(config["deepstack_visual_indexes"]) if deepstack else 0,
        output=_size(config, "out_hidden_size"),
    )


def _audio(config: Config) -> AudioShape:
    """Read the audio tower's sizes from `audio_config`. Missing fields have transformers' defaults."""
    config = {**AUDIO_DEFAULTS, **config}
    return AudioShape(
        layers=_size(config, "encoder_layers"),
        hidden=_size(config, "d_model"),
        ffn=_size(config, "encoder_ffn_dim"),
        bands=_size(config, "num_mel_bins"),
        channels=_size(config, "downsample_hidden_size"),
        output=_size(config, "output_dim"),
    )


def _experts(config: Config, family: _Family) -> ExpertShape:
    return ExpertShape(
        count=_size(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        per_token=_size(config, "num_experts_per_tok"),
        ffn=_size(config, "moe_intermediate_size"),
        shared_ffn=_size(config, "shared_expert_intermediate_size") if family.shared else 0,
    )


def _size(config: Config, field: str) -> int:
    value = config[field]
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}: it must be a whole number of at least 1")
    return value
