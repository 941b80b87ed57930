"""The trainer's view of a Hugging Face config.json: sizes and switches of a model."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

ModelType = Literal["llama", "qwen3", "qwen2_moe", "qwen3_moe"]
SUPPORTED: tuple[str, ...] = ("llama", "qwen3", "qwen2_moe", "qwen3_moe")


class ModelError(ValueError):
    """A model folder that the trainer can't use."""


@dataclass(frozen=True)
class ExpertArchitecture:
    """The mixture-of-experts part of a model."""

    count: int
    """Experts per layer."""
    per_token: int
    """Experts that each token goes to."""
    ffn_size: int
    """Inner width of one expert."""
    normalize: bool
    """Whether the chosen experts' weights are normalised to add up to 1."""
    shared_ffn_size: int | None
    """Inner width of the gated expert shared by all tokens; None without one."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder-only model."""

    model_type: ModelType
    """Hugging Face's name of the architecture."""
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
    """Longest supported sequence."""
    tied_embeddings: bool
    """Whether the output layer is the embedding."""
    qk_norm: bool
    """Whether queries and keys are normalised per head."""
    qkv_bias: bool
    """Whether queries, keys and values have biases."""
    experts: ExpertArchitecture | None
    """Mixture of experts, or None for a dense model."""
    rope: dict[str, Any]
    """Rotary embedding: rope_theta, rope_type and that type's parameters."""

    def inverse_frequencies(self) -> torch.Tensor:
        """Angular frequencies of the rotary embedding (RoFormer, arXiv 2104.09864), float32 [head_size / 2].

        rope_type "llama3" scales the low ones down as Llama 3.1 does (arXiv 2407.21783, section 3.4).
        """
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.int64).float() / self.head_size
        frequencies = 1.0 / (self.rope["rope_theta"] ** exponents)
        if self.rope["rope_type"] == "default":
            return frequencies
        factor = self.rope["factor"]
        low, high = self.rope["low_freq_factor"], self.rope["high_freq_factor"]
        original = self.rope["original_max_position_embeddings"]
        wavelengths = 2 * math.pi / frequencies
        share = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - share) * frequencies / factor + share * frequencies


def read_architecture(folder: Path) -> Architecture:
    """Read a model folder's config.json.

    Args:
        folder: a Hugging Face model folder.

    Raises:
        ModelError: the file is missing or isn't JSON, a field is missing, or a feature isn't supported.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json: it must be a Hugging Face model folder") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} isn't valid JSON: {error}") from error
    try:
        return _parse(config)
    except KeyError as error:
        raise ModelError(f"{path} has no field {error}") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _parse(config: dict[str, Any]) -> Architecture:
    model_type = config["model_type"]
    if model_type not in SUPPORTED:
        raise ModelError(f"model_type is {model_type!r}: supported are {', '.join(SUPPORTED)}")
    for field, supported in (("attention_bias", False), ("mlp_bias", False), ("use_sliding_window", False)):
        if config.get(field, supported) != supported:
            raise ModelError(f"{field} is {config[field]!r}: only {supported!r} is supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f'hidden_act is {config["hidden_act"]!r}: only "silu" is supported')
    heads = config["num_attention_heads"]
    return Architecture(
        model_type=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        norm_epsilon=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        tied_embeddings=config.get("tie_word_embeddings", False),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        qkv_bias=model_type == "qwen2_moe" and config.get("qkv_bias", True),
        experts=_experts(config) if model_type.endswith("_moe") else None,
        rope=_rope(config),
    )


def _experts(config: dict[str, Any]) -> ExpertArchitecture:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            "mlp_only_layers and decoder_sparse_step: only models with experts in every layer are supported"
        )
    # Two names exist for the count.
    count = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return ExpertArchitecture(
        count=count,
        per_token=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        normalize=config.get("norm_topk_prob", False),
        shared_ffn_size=config["shared_expert_intermediate_size"] if config["model_type"] == "qwen2_moe" else None,
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return rope_parameters (transformers 5); convert rope_theta and rope_scaling (older releases) to that form."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ("default", "llama3"):
        raise ModelError(f'rope_type is {rope["rope_type"]!r}: supported are "default" and "llama3"')
    return rope
