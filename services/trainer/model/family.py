"""A family of models: how to read its config.json, and which tensors a layer has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.trainer.model.architecture import Architecture, ExpertArchitecture, ModelError, read_rope
from services.trainer.model.tensor_rules import EXPERT, Rule, layer_rules

Config = dict[str, Any]
"""A config.json."""


@dataclass(frozen=True)
class Family:
    """A family of models: one `model_type` of Hugging Face."""

    read: Callable[[Config], Architecture]
    """Function that reads a config.json, mostly with `decoder`. Raises ModelError, or KeyError for a missing field."""
    rules: Callable[[Architecture, int], tuple[Rule, ...]] = layer_rules
    """Function that returns a layer's tensor rules, except those of its routed experts. Layers are numbered from 0 over
    the whole model."""
    expert_rules: tuple[Rule, ...] = EXPERT
    """Tensor rules of one routed expert."""
    prefix: str = "model."
    """Prefix of the decoder's tensor names in Hugging Face's files."""
    outer: str = ""
    """Prefix of the output layer's name."""


def decoder(config: Config, *, partial_rotary: bool = False, **switches: Any) -> Architecture:
    """Read the fields that all families have in common.

    Args:
        config: the config.json. Where a family's defaults differ from Llama's, pass `{"name": default, **config}`.
        partial_rotary: whether `partial_rotary_factor` may be less than 1.
        switches: fields of `Architecture` that the family reads itself.

    Raises:
        ModelError: a field has a value that isn't supported.
        KeyError: a field is missing.
    """
    refuse(config, mlp_bias=False, hidden_act="silu")
    if config.get("quantization_config"):
        raise ModelError("quantization_config: the weights are quantised. Train the unquantised model")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads is {kv_heads}: it must divide num_attention_heads, which is {heads}")
    return Architecture(
        model_type=config["model_type"],
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        ffn_size=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_size(config, "head_dim") if config.get("head_dim") else _size(config, "hidden_size") // heads,
        norm_epsilon=config["rms_norm_eps"],
        max_positions=_size(config, "max_position_embeddings"),
        tied_embeddings=config.get("tie_word_embeddings", False),
        rope=read_rope(config, partial=partial_rotary),
        **switches,
    )


def experts(config: Config, shared_ffn_size: int | None = None) -> ExpertArchitecture:
    """Read the routed experts of Qwen's mixtures.

    Raises:
        ModelError: some layers have no experts.
        KeyError: a field is missing.
    """
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            "mlp_only_layers and decoder_sparse_step: only models with experts in every layer are supported"
        )
    return ExpertArchitecture(
        # Two names exist for the count.
        count=_size(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        per_token=_size(config, "num_experts_per_tok"),
        ffn_size=_size(config, "moe_intermediate_size"),
        normalize=config.get("norm_topk_prob", False),
        shared_ffn_size=shared_ffn_size,
    )


def windows(config: Config, layer_types: Sequence[str]) -> dict[str, Any]:
    """Return the fields `window` and `windowed` of `Architecture`.

    Args:
        config: the config.json, whose `sliding_window` is the window.
        layer_types: "sliding_attention" or "full_attention" for each layer.

    Raises:
        ModelError: a layer has another type, the number of types is wrong, or there is no window.
    """
    if other := sorted(set(layer_types) - {"sliding_attention", "full_attention"}):
        raise ModelError(f'layer_types has {other}: supported are "full_attention" and "sliding_attention"')
    if len(layer_types) != config["num_hidden_layers"]:
        raise ModelError(f"layer_types has {len(layer_types)} of num_hidden_layers = {config['num_hidden_layers']}")
    if "sliding_attention" not in layer_types:
        return {}
    return {"window": _size(config, "sliding_window"), "windowed": tuple(x == "sliding_attention" for x in layer_types)}


def refuse(config: Config, **supported: Any) -> None:
    """Raise ModelError unless each field has its only supported value or is missing."""
    for field, value in supported.items():
        if (found := config.get(field, value)) != value:
            raise ModelError(f"{field} is {found!r}: only {value!r} is supported")


def _size(config: Config, field: str) -> int:
    value = config[field]
    if type(value) is not int or value < 1:
        raise ModelError(f"{field} is {value!r}: it must be a whole number of at least 1")
    return value
