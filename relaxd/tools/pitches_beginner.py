"""Makes the tiny model of examples/pitches.toml: a Qwen3-Omni that answers any sound with any number.

`python -m relaxd.tools.pitches_beginner FOLDER` makes it. It runs as a separate process, so that the command line needs
no torch.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relaxd.data.towers import spectrogram
from relaxd.data.vision import VisionModel
from relaxd.media.kinds import NormalMedia
from relaxd.media.placeholders import AUDIO
from relaxd.media.sounds import decode_wav
from relaxd.tools.sight_beginner import MERGE, PATCH, TEXT, TOWER, UPDATES, Task, processor, teach, tokenizer_of_task
from relaxd.tools.tone_pitches import PITCHES, PROMPT, RATE, draw, encoded
from relaxd.tools.tool_beginner import save

TASK = Task(
    AUDIO, PROMPT.removeprefix("<audio>"), list(map(str, range(PITCHES))), lambda seed: encoded(draw(seed)[1]), PATCH
)
BANDS = 32
"""Number of mel bands of the spectrogram."""
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "norm_topk_prob": False}
EARS = {
    "num_mel_bins": BANDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "output_dim": 64,
    "downsample_hidden_size": 16,
    "max_source_positions": 100,
}


def make(folder: Path, task: Task, updates: int = UPDATES) -> None:
    """Make a task's model and write it with its tokenizer, chat template and processors into `folder`."""
    model = _random_model(folder, tokenizer_of_task(task), task)
    teach(model.thinker.lm_head, folder, task, updates, lambda ids, *given: _hidden(model.thinker, ids, *given))
    model.save_pretrained(folder)


def _random_model(folder: Path, tokenizer: PreTrainedTokenizerFast, task: Task) -> Qwen3OmniMoeForConditionalGeneration:
    """Make a model with random weights and no talker, and write it with its tokenizer and processors into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would only wait for each other
    thinker: dict[str, Any] = {
        "text_config": {**TEXT, **EXPERTS, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1},
        "vision_config": {**TOWER, "num_position_embeddings": 1},
        "audio_config": EARS,
        "tie_word_embeddings": False,
        **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in task.marks.items()},
    }
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False))
    for module in model.thinker.model.audio_tower.modules():
        # With transformers' small initial weights, the frames' positions would hide the sound itself.
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.reset_parameters()
    save(folder, model, tokenizer)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": BANDS,
        "sampling_rate": RATE,
        "hop_length": RATE // 100,
        "n_fft": RATE // 40,
    }
    area = (task.side * MERGE) ** 2
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor(2, area, area), **extractor}))
    return model


def _hidden(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration, ids: torch.Tensor, vision: VisionModel, item: NormalMedia
) -> torch.Tensor:
    """Return the hidden states for token ids [answers, T], a prompt with one sound and each of its answers."""
    assert vision.sound is not None
    features = spectrogram(decode_wav(item.content), vision.sound).repeat(len(ids), 1, 1)
    heard = {"input_features": features, "feature_attention_mask": torch.ones_like(features[:, 0], dtype=torch.long)}
    positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)  # a sound has those of text
    states: torch.Tensor = thinker.model(ids, position_ids=positions, **heard).last_hidden_state
    return states


if __name__ == "__main__":
    make(Path(sys.argv[1]), TASK)
