"""Qwen2 and Qwen2.5, and models with the same architecture: QwQ, DeepSeek-R1-Distill-Qwen."""

from typing import Any

from services.trainer.model.architecture import Architecture
from services.trainer.model.family import Config, Family, decoder, windows


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen2 config.json."""
    return decoder({"num_key_value_heads": 32, **config}, qkv_bias=True, **qwen_windows(config))


def qwen_windows(config: Config) -> dict[str, Any]:
    """Return `window` and `windowed` of `Architecture`. With `use_sliding_window`, layers from `max_window_layers` on
    have a window."""
    sliding, layers = config.get("use_sliding_window", False), config["num_hidden_layers"]
    first = config.get("max_window_layers", 28) if sliding else layers
    types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    window = config.get("sliding_window", 4096) if sliding else None
    return windows({**config, "sliding_window": window}, config.get("layer_types") or types)


FAMILY = Family(read)
