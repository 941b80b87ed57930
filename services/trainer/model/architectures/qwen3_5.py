"""Qwen3.5, dense: its decoder with interleaved M-RoPE, and a vision tower without DeepStack."""

from dataclasses import replace

from services.trainer.model.architecture import VISUAL, Architecture
from services.trainer.model.architectures.qwen3_5_text import INPUT
from services.trainer.model.architectures.qwen3_5_text import read as read_text
from services.trainer.model.architectures.qwen3_next import rules
from services.trainer.model.architectures.qwen3_vl import as_in, tower, with_sections
from services.trainer.model.family import Config, Family

SECTIONS = (11, 11, 10)
"""Default of `mrope_section`: numbers of rotary frequencies for time, row and column."""


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3.5 config.json, whose decoder is `text_config`."""
    return with_eyes(read_text(as_in(config, config["text_config"])), config)


def with_eyes(shape: Architecture, config: Config) -> Architecture:
    """Add interleaved M-RoPE and Qwen3.5's vision tower to a decoder's architecture.

    Raises:
        ModelError: `mrope_section` doesn't fit the heads, or the tower's rows aren't as wide as the decoder.
    """
    shape = with_sections(shape, SECTIONS)
    eyes = tower(shape, config, "vision_config", name=VISUAL, prefix="model.", source="Qwen3_5VisionModel")
    return replace(shape, towers=(eyes,))


FAMILY = Family(read, rules=lambda shape, layer: rules(shape, layer, INPUT), prefix="model.language_model.")
