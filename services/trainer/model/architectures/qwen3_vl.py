"""Qwen3-VL, dense (arXiv 2511.21631): Qwen3 with interleaved M-RoPE, a vision tower and DeepStack."""

import json
from dataclasses import replace
from typing import Any

from services.trainer.model.architecture import VISUAL, Architecture, ModelError, TowerArchitecture
from services.trainer.model.family import Config, Family, decoder

SECTIONS = (24, 20, 20)
"""Default of `mrope_section`: numbers of rotary frequencies for time, row and column."""


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3-VL config.json, whose decoder is `text_config`."""
    text = {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0, **config["text_config"]}
    return with_eyes(multimodal(config, text), config)


def with_eyes(shape: Architecture, config: Config) -> Architecture:
    """Add Qwen3-VL's vision tower to a decoder's architecture. Raises ModelError as `tower` does."""
    eyes = tower(shape, config, "vision_config", name=VISUAL, prefix="model.", source="Qwen3VLVisionModel")
    return replace(shape, towers=(eyes,))


def multimodal(config: Config, text: Config, **switches: Any) -> Architecture:
    """Read the architecture of a multimodal model's decoder, which has interleaved M-RoPE.

    Args:
        config: the model's configuration.
        text: the decoder's configuration.
        switches: further fields of `Architecture`.

    Raises:
        ModelError: `mrope_section` doesn't fit the heads.
    """
    bias = text.get("attention_bias", False)
    shape = decoder(as_in(config, text), qk_norm=True, qkv_bias=bias, output_bias=bias, **switches)
    return with_sections(shape, SECTIONS)


def as_in(config: Config, text: Config) -> Config:
    """Return the decoder's config with model_type and tie_word_embeddings of the whole model, as in transformers."""
    return {**text, "model_type": config["model_type"], "tie_word_embeddings": config.get("tie_word_embeddings", False)}


def with_sections(shape: Architecture, default: tuple[int, ...]) -> Architecture:
    """Add interleaved M-RoPE to a decoder's architecture.

    Raises:
        ModelError: `mrope_section` doesn't fit the heads.
    """
    sections = tuple(shape.rope.parameters.get("mrope_section", default))
    if len(sections) != 3 or sum(sections) != (rotated := shape.rope.rotated(shape.head_size)) // 2:
        raise ModelError(
            f"mrope_section is {list(sections)}: it must have three numbers that add up to half of the rotated part of "
            f"a head, which is {rotated} of head_dim = {shape.head_size}"
        )
    return replace(shape, rope=replace(shape.rope, sections=sections))


def tower(
    shape: Architecture,
    config: Config,
    section: str,
    *,
    name: str,
    prefix: str,
    source: str,
    output: str = "out_hidden_size",
) -> TowerArchitecture:
    """Read the architecture of a vision or audio tower.

    Args:
        shape: the decoder's architecture.
        config: the configuration that has the tower's section.
        section: name of the section.
        name: `TowerArchitecture.name`.
        prefix: `TowerArchitecture.prefix`.
        source: `TowerArchitecture.source`.
        output: the section's field with the width of the tower's rows, which is 3584 by default.

    Raises:
        ModelError: the rows aren't as wide as the decoder.
    """
    own = config[section]
    if (width := own.get(output, 3584)) != shape.hidden_size:
        raise ModelError(
            f"{section}.{output} is {width}: it must be the decoder's hidden_size, which is {shape.hidden_size}"
        )
    return TowerArchitecture(name, prefix, source, json.dumps(own))


FAMILY = Family(read, prefix="model.language_model.")
