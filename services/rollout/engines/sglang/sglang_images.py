"""Images and videos of prompts as SGLang takes them, and the change in its model that takes them.

Each time of a video is an image of its own, as the tower sees it. Items carry an image's pixels as bytes, cut into
patches, which are normalised on the device: a float32 for each pixel of each frame would be eight times as much, in
every message of a group's samples and in the scheduler's memory.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers import mm_utils
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

from relaxd.data.device_patches import normalised
from relaxd.data.vision import VisionModel
from services.rollout.engines.seen_prompts import SeenPrompt


def to_sglang(prompt: SeenPrompt, more: int) -> MultimodalProcessorOutput:
    """Return a prompt's media with the positions of its tokens and of `more` tokens behind it.

    SGLang computes nothing itself: hashes, places and positions are ours.
    """
    items = [
        MultimodalDataItem(
            modality=Modality.IMAGE,
            hash=int(frame.sha256, 16),
            offsets=[frame.span],
            feature=frame.patches,
            model_specific_data={"image_grid_thw": torch.tensor([frame.grid])},
        )
        for frame in prompt.frames
    ]
    return MultimodalProcessorOutput(
        mm_items=items,
        im_token_id=prompt.vision.tokens.token,
        # A request that is retracted gets positions for its answer from the last one here.
        mrope_positions=torch.from_numpy(prompt.positions(more + 1)),
        mrope_position_delta=torch.tensor([[prompt.offset]]),
    )


def take_cut_patches(model: Any, vision: VisionModel, device: torch.device) -> None:
    """Have a model's vision tower take the patches of `to_sglang`."""
    look = model.get_image_feature

    def look_at_cut(items: Sequence[MultimodalDataItem]) -> torch.Tensor:
        normal = [copy.copy(item) for item in items]
        for item in normal:
            item.feature = normalised(torch.from_numpy(item.feature).to(device), vision)
        found: torch.Tensor = look(normal)
        return found

    model.get_image_feature = look_at_cut


def forget_features() -> None:
    """Empty SGLang's cache of the tower's outputs, which it finds by the images' hashes whatever the weights."""
    if mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()
