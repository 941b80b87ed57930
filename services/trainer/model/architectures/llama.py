"""Llama 2 and 3, and models with the same architecture: SmolLM2, TinyLlama, DeepSeek-R1-Distill-Llama."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.family import Config, Family, decoder


def read(config: Config) -> Architecture:
    """Read the architecture from a Llama config.json."""
    bias = config.get("attention_bias", False)
    return decoder(config, qkv_bias=bias, output_bias=bias)


FAMILY = Family(read)
