"""Images of prompts on their way into a transformers model: embeddings with the rows of its vision tower."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from relaxd.data.device_patches import normalised
from relaxd.data.vision import VisionModel
from relaxd.media import Grid
from services.rollout.engines.prompt_images import SeenPrompt, read_model_vision

TOWER = "model.visual."
"""Beginning of the names of the tower's parameters."""


def load_model(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, VisionModel | None]:
    """Return a model, and its rules for images if it sees any. Raises DataError: the rules are missing or damaged."""
    vision = read_model_vision(folder)
    kind = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype=dtype).eval(), vision


def embed(
    model: PreTrainedModel, ids: torch.Tensor, prompts: Sequence[SeenPrompt | None], paddings: Sequence[int]
) -> dict[str, Any]:
    """Return the language model's inputs for ids [rows, T]: embeddings, with those of images in their places.

    The tower sees each image once. Images are in their places in the prompt, not where the image token is: an answer
    that goes on may have that token, too.
    """
    grids: dict[str, Grid] = {}
    patches: dict[str, torch.Tensor] = {}
    order: list[str] = []
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            grids |= zip(prompt.hashes, prompt.grids, strict=True)
            cut = {name: torch.from_numpy(one).to(model.device) for name, one in prompt.patches.items()}
            patches |= {name: normalised(one, prompt.vision) for name, one in cut.items()}
            order += prompt.hashes
            begin = paddings[row]
            mask[row, begin : begin + len(prompt.layout.tokens)] = torch.from_numpy(prompt.layout.modality != 0)
    pixels = torch.cat(list(patches.values()))
    thw = torch.tensor([grids[name] for name in patches])
    body: Any = model.model
    found = body.get_image_features(pixels, thw.to(model.device), return_dict=True)
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
