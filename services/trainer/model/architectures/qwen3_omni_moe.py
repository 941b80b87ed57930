"""The thinker of Qwen3-Omni (arXiv 2509.17765): Qwen3-MoE with interleaved M-RoPE, which sees and hears.

The talker and what makes waves of its codes are not trained, not sent and not exported.
"""

from dataclasses import replace

from services.trainer.model.architecture import Architecture
from services.trainer.model.architectures.qwen3_vl import OUTPUT, multimodal, tower
from services.trainer.model.family import Config, Family, experts
from services.trainer.model.tower_outputs import AUDIO_TOWER, VISUAL

PREFIX = "thinker."


def read(config: Config) -> Architecture:
    """Read a config.json of this family, whose decoder is `text_config` of `thinker_config`."""
    thinker = {**config["thinker_config"], "model_type": config["model_type"]}
    text = {"num_key_value_heads": 4, "norm_topk_prob": True, **thinker["text_config"]}
    shape = multimodal(thinker, text, experts=experts(text))
    eyes = tower(
        shape, thinker, "vision_config", OUTPUT, name=VISUAL, prefix=PREFIX, source="Qwen3OmniMoeVisionEncoder"
    )
    ears = tower(
        shape, thinker, "audio_config", "output_dim", name=AUDIO_TOWER, prefix=PREFIX, source="Qwen3OmniMoeAudioEncoder"
    )
    return replace(shape, towers=(eyes, ears))


FAMILY = Family(read, prefix="thinker.model.", outer=PREFIX)
