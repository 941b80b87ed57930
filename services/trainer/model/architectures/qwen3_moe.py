"""Qwen3-MoE: routed experts in every layer."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.family import Config, Family, decoder, experts, windows


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3-MoE config.json."""
    bias = config.get("attention_bias", False)
    windowed = {}
    if config.get("use_sliding_window", False):
        windowed = windows({"sliding_window": 4096, **config}, ["sliding_attention"] * config["num_hidden_layers"])
    return decoder(config, qk_norm=True, qkv_bias=bias, output_bias=bias, experts=experts(config), **windowed)


FAMILY = Family(read)
