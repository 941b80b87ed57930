"""Qwen1.5-MoE and Qwen2-MoE: routed experts and a gated expert shared by all tokens."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.family import Config, Family, decoder, experts, refuse


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen2-MoE config.json."""
    refuse(config, use_sliding_window=False)
    shared = config["shared_expert_intermediate_size"]
    bias = config.get("qkv_bias", True)
    return decoder(config, qkv_bias=bias, experts=experts(config, shared))


FAMILY = Family(read)
