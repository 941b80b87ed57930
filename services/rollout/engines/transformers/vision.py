"""Images of prompts on their way into a transformers model: pixels, positions, and the rows of its vision tower."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from relaxd.data.special_tokens import read_object
from relaxd.data.vision import VisionModel, read_vision
from relaxd.media import Grid, Layout, MediaError, lay_out
from relaxd.media.cache import decode_png
from relaxd.media.prompt_media import contents_of, grids_of, hashes_of
from services.rollout.engines.request_types import EngineError, Request

SEEING = ("qwen3_vl",)
"""Types of models whose images this engine understands."""
TOWER = "model.visual."
"""Beginning of the names of the tower's parameters."""


def load_model(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, VisionModel | None]:
    """Return a model, and its rules for images if it sees any. Raises DataError: the rules are missing or damaged."""
    if read_object(folder / "config.json").get("model_type") not in SEEING:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), None
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval(), read_vision(folder)


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with images, ready for the model."""

    layout: Layout
    hashes: tuple[str, ...]
    """Of its images, in order."""
    grids: list[Grid]
    """Of its images, in order."""
    patches: dict[str, np.ndarray]
    """Of each image, by hash: float32 [patches, patch_dim]."""

    @property
    def offset(self) -> int:
        """Difference between the position of a token after the prompt and its index in the sequence."""
        return int(self.layout.next_position) - len(self.layout.tokens)


def see(request: Request, vision: VisionModel | None) -> SeenPrompt | None:
    """Return a request's prompt with its images; None without any.

    Raises EngineError: the model sees no images, or these aren't the prompt's.
    """
    media = request.media
    if not media:
        return None
    if vision is None:
        raise EngineError("the prompt has images, but the model sees none")
    grids, hashes = grids_of(media.records), hashes_of(media.records)
    try:
        layout = lay_out(np.asarray(request.prompt_tokens, np.int32), grids, vision.tokens)
        stored = contents_of(media.records, media.array)
        patches = {name: vision.patches(decode_png(stored[name])) for name in hashes}
    except (MediaError, KeyError, OSError) as error:
        raise EngineError(f"the prompt's images can't be used: {error}") from error
    for name, (time, rows, columns) in zip(hashes, grids, strict=True):
        if len(patches[name]) != time * rows * columns:
            raise EngineError(f"the prompt's image {name} has {len(patches[name])} patches, but its grid is {grids}")
    return SeenPrompt(layout, hashes, grids, patches)


def embed(
    model: PreTrainedModel, ids: torch.Tensor, prompts: Sequence[SeenPrompt | None], paddings: Sequence[int]
) -> dict[str, Any]:
    """Return the language model's inputs for ids [rows, T]: embeddings, with those of images in their places.

    The tower sees each image once. Images are in their places in the prompt, not where the image token is: an answer
    that goes on may have that token, too.
    """
    grids: dict[str, Grid] = {}
    patches: dict[str, np.ndarray] = {}
    order: list[str] = []
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            grids |= zip(prompt.hashes, prompt.grids, strict=True)
            patches |= prompt.patches
            order += prompt.hashes
            begin = paddings[row]
            mask[row, begin : begin + len(prompt.layout.tokens)] = torch.from_numpy(prompt.layout.modality != 0)
    pixels = torch.from_numpy(np.concatenate(list(patches.values())))
    thw = torch.tensor([grids[name] for name in patches])
    body: Any = model.model
    found = body.get_image_features(pixels.to(model.device), thw.to(model.device), return_dict=True)
    places = {name: place for place, name in enumerate(patches)}

    def rows(features: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([features[places[name]] for name in order])

    embeddings = body.get_input_embeddings()(ids.to(model.device))
    embeddings[mask.to(model.device)] = rows(found.pooler_output).to(embeddings.dtype)
    return {
        "inputs_embeds": embeddings,
        "visual_pos_masks": mask.to(model.device),
        "deepstack_visual_embeds": [rows(features) for features in found.deepstack_features],
    }
