"""Qwen3, dense; also with YaRN (`rope_scaling` in config.json)."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.architectures.qwen2 import qwen_windows
from services.trainer.model.family import Config, Family, decoder


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3 config.json."""
    bias = config.get("attention_bias", False)
    config = {"num_key_value_heads": 32, "head_dim": 128, **config}
    return decoder(config, qk_norm=True, qkv_bias=bias, output_bias=bias, **qwen_windows(config))


FAMILY = Family(read)
