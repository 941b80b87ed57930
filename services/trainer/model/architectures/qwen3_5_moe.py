"""Qwen3.5 with a mixture of experts: its decoder with interleaved M-RoPE, and the vision tower of the dense Qwen3.5."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.architectures.qwen3_5 import with_eyes
from services.trainer.model.architectures.qwen3_5_moe_text import STACKED_EXPERT
from services.trainer.model.architectures.qwen3_5_moe_text import read as read_text
from services.trainer.model.architectures.qwen3_5_text import INPUT
from services.trainer.model.architectures.qwen3_next import rules
from services.trainer.model.architectures.qwen3_vl import as_in
from services.trainer.model.family import Config, Family


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3.5-MoE config.json, whose decoder is `text_config`."""
    return with_eyes(read_text(as_in(config, config["text_config"])), config)


FAMILY = Family(
    read,
    rules=lambda shape, layer: rules(shape, layer, INPUT),
    expert_rules=STACKED_EXPERT,
    prefix="model.language_model.",
)
