"""Converts the images, videos and sounds of prompts to SGLang's form, and patches its model to accept them.

Each time step of a video is a separate image, as in the tower. Items of images contain patches of uint8 pixels, which
are normalised on the device: float32 values of all frames would be eight times as large, in every message of a group's
samples and in the scheduler's memory. Items of sounds contain audio samples; the scheduler's process computes the
spectrogram.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers import mm_utils
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

from relaxd.data.towers import normalised, spectrogram
from relaxd.data.vision import VisionModel
from services.rollout.engines.seen_prompts import HeardSound, SeenFrame, SeenPrompt


def to_sglang(prompt: SeenPrompt, more: int) -> MultimodalProcessorOutput:
    """Return a prompt's media, with the positions of its tokens and of `more` tokens after it.

    They contain relaxd's hashes, places and positions, so that SGLang computes none.
    """
    items = [
        MultimodalDataItem(hash=int(item.sha256, 16), offsets=item.spans, **_content(item)) for item in prompt.items
    ]
    return MultimodalProcessorOutput(
        mm_items=items,
        im_token_id=prompt.vision.tokens.token,
        audio_token_id=prompt.vision.tokens.audio,
        # SGLang continues from the last position here for the answer of a retracted request.
        mrope_positions=torch.from_numpy(prompt.positions(more + 1)),
        mrope_position_delta=torch.tensor([[prompt.offset]]),
    )


def _content(item: SeenFrame | HeardSound) -> dict[str, Any]:
    if isinstance(item, HeardSound):
        return {"modality": Modality.AUDIO, "feature": item.samples}
    grid = {"image_grid_thw": torch.tensor([item.grid])}
    return {"modality": Modality.IMAGE, "feature": item.patches, "model_specific_data": grid}


def take_media(model: Any, vision: VisionModel, device: torch.device) -> None:
    """Patch a model so that its towers accept the items of `to_sglang`."""
    model = getattr(model, "thinker", model)  # Qwen3-Omni is a model within a model
    look = model.get_image_feature

    def look_at_cut(items: Sequence[MultimodalDataItem]) -> torch.Tensor:
        normal = [copy.copy(item) for item in items]
        for item in normal:
            item.feature = normalised(torch.from_numpy(item.feature).to(device), vision)
        found: torch.Tensor = look(normal)
        return found

    def hear(items: Sequence[MultimodalDataItem]) -> torch.Tensor:
        """Process each sound alone. In a batch with a longer sound, the tower's output for a sound of less than a
        second would differ."""
        assert vision.sound is not None  # or the prompt would have been refused
        tower, rows = model.audio_tower, []
        for item in items:
            features = spectrogram(item.feature, vision.sound).to(device, tower.dtype)
            lengths = torch.tensor([features.shape[1]], device=device)
            rows.append(tower(features, feature_lens=lengths).last_hidden_state)
        return torch.cat(rows)

    model.get_image_feature = look_at_cut
    model.get_audio_feature = hear


def forget_features() -> None:
    """Clear SGLang's cache of tower outputs. Its keys are hashes of items and don't depend on the weights.

    All ranks must clear it after the same version, because they run the towers together.
    """
    if mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()
