"""Qwen3-VL, dense (arXiv 2511.21631): Qwen3 with interleaved M-RoPE, a vision tower and DeepStack."""

import json
from dataclasses import replace

from services.trainer.model.architecture import Architecture, ModelError, VisionArchitecture
from services.trainer.model.family import Config, Family, decoder

SECTIONS = (24, 20, 20)
"""Default of `mrope_section`."""
DEEPSTACK = (8, 16, 24)
"""Default of `deepstack_visual_indexes`: layers of the tower, as many as layers of the decoder get its rows."""


def read(config: Config) -> Architecture:
    """Read a config.json of this family, whose decoder is `text_config`."""
    text = {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0, **config["text_config"]}
    # transformers ties by the outer configuration.
    text |= {"model_type": config["model_type"], "tie_word_embeddings": config.get("tie_word_embeddings", False)}
    bias = text.get("attention_bias", False)
    shape = decoder(text, qk_norm=True, qkv_bias=bias, output_bias=bias)
    sections = tuple(shape.rope.parameters.get("mrope_section", SECTIONS))
    if len(sections) != 3 or sum(sections) != shape.head_size // 2:
        raise ModelError(
            f"mrope_section is {list(sections)}: it must have three numbers that add up to half of head_dim, which is "
            f"{shape.head_size}"
        )
    eyes = {"out_hidden_size": 3584, "patch_size": 16, "spatial_merge_size": 2, **config["vision_config"]}
    if eyes["out_hidden_size"] != shape.hidden_size:
        raise ModelError(
            f"vision_config.out_hidden_size is {eyes['out_hidden_size']}: it must be the decoder's hidden_size, which "
            f"is {shape.hidden_size}"
        )
    vision = VisionArchitecture(
        config=json.dumps(config["vision_config"]),
        image_token=config["image_token_id"],
        patch=eyes["patch_size"],
        merge=eyes["spatial_merge_size"],
        deepstack=len(eyes.get("deepstack_visual_indexes", DEEPSTACK)),
    )
    return replace(shape, rope=replace(shape.rope, sections=sections), vision=vision)


FAMILY = Family(read, prefix="model.language_model.")
