"""The thinker of Qwen3-Omni (arXiv 2509.17765): Qwen3-MoE with interleaved M-RoPE, a vision and an audio tower.

The talker and its waveform decoder are not trained, sent or exported.
"""

from dataclasses import replace

from services.trainer.model.architecture import AUDIO_TOWER, VISUAL, Architecture
from services.trainer.model.architectures.qwen3_vl import multimodal, tower
from services.trainer.model.family import Config, Family, experts

PREFIX = "thinker."


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3-Omni config.json, whose decoder is `text_config` of `thinker_config`."""
    thinker = {**config["thinker_config"], "model_type": config["model_type"]}
    text = {"num_key_value_heads": 4, "norm_topk_prob": True, **thinker["text_config"]}
    shape = multimodal(thinker, text, experts=experts(text))
    eyes = {"name": VISUAL, "source": "Qwen3OmniMoeVisionEncoder"}
    ears = {"name": AUDIO_TOWER, "source": "Qwen3OmniMoeAudioEncoder", "output": "output_dim"}
    sections = {"vision_config": eyes, "audio_config": ears}
    return replace(
        shape, towers=tuple(tower(shape, thinker, one, prefix=PREFIX, **own) for one, own in sections.items())
    )


FAMILY = Family(read, prefix="thinker.model.", outer=PREFIX)
