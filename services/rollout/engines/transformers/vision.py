"""Embeddings of prompts with media for a transformers model, from the outputs of its towers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relaxd.data.special_tokens import read_object
from relaxd.data.towers import TowerOutputs, normalised, spectrogram
from relaxd.data.vision import VisionModel
from relaxd.media.media_tokens import IMAGE, TEXT, VIDEO, Grid
from services.rollout.engines.seen_prompts import SeenPrompt, read_model_vision

TOWERS = ("model.visual.", "model.audio_tower.")
"""Prefixes of the names of tower parameters."""
KEPT_BYTES = 1 << 30
"""Maximum size of the cached tower outputs, in bytes."""
THINKERS = {"qwen3_omni_moe": Qwen3OmniMoeThinkerForConditionalGeneration}
"""Model class to load, by model type, if only a part of the model generates text: Qwen3-Omni's thinker."""


def load_model(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, VisionModel | None]:
    """Return a model and its media rules, None if it takes no media.

    Raises DataError if the rules are missing or damaged.
    """
    vision = read_model_vision(folder, "transformers")
    usual = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    kind: Any = THINKERS.get(str(read_object(folder / "config.json").get("model_type")), usual)
    return kind.from_pretrained(folder, dtype=dtype).eval(), vision


def tower_rows(
    model: PreTrainedModel, outputs: TowerOutputs, prompts: Sequence[SeenPrompt]
) -> dict[str, list[torch.Tensor]]:
    """Return the towers' outputs for the prompts' media, by the hash of each medium (`parts_of`).

    Each tensor is [rows, hidden], on the model's device. A medium's first tensor has the embeddings of its tokens; for
    images and videos, tensors for DeepStack follow.
    """
    runs = {
        name: partial(_hear, model, name, prompt) if name in prompt.sounds else partial(_see, model, name, grid, prompt)
        for prompt in prompts
        for name, grid in prompt.parts
    }
    return outputs.of((one for name, one in model.named_parameters() if name.startswith(TOWERS)), runs)


def _see(model: Any, name: str, grid: Grid, prompt: SeenPrompt) -> list[torch.Tensor]:
    patches = normalised(torch.from_numpy(prompt.patches[name]).to(model.device), prompt.vision)
    seen = model.model.get_image_features(patches, torch.tensor([grid], device=patches.device), return_dict=True)
    return [seen.pooler_output[0], *(one[0] for one in getattr(seen, "deepstack_features", ()))]


def _hear(model: Any, name: str, prompt: SeenPrompt) -> list[torch.Tensor]:
    assert prompt.vision.sound is not None  # or the prompt would have been refused
    body = model.model
    features = spectrogram(prompt.sounds[name], prompt.vision.sound).to(body.device, body.dtype)
    lengths = torch.tensor([features.shape[1]], device=body.device)
    return [body.audio_tower(features, feature_lens=lengths, return_dict=True).last_hidden_state]


def embed(
    model: PreTrainedModel,
    towers: TowerOutputs,
    ids: torch.Tensor,
    prompts: Sequence[SeenPrompt | None],
    paddings: Sequence[int],
) -> dict[str, Any]:
    """Return the language model's inputs for token ids [rows, T]: embeddings, with tower outputs at media tokens.

    Media tokens are located by the prompt's layout: a search by id might find others in a continued answer.
    """
    shown = [prompt for prompt in prompts if prompt is not None]
    rows = tower_rows(model, towers, shown)
    mask, seen_mask = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(2))
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            own = slice(paddings[row], paddings[row] + len(prompt.layout.tokens))
            mask[row, own] = torch.from_numpy(prompt.layout.modality != TEXT)
            seen_mask[row, own] = torch.from_numpy(np.isin(prompt.layout.modality, (IMAGE, VIDEO)))
    embeddings = model.get_input_embeddings()(ids.to(model.device))
    of_prompts = [
        torch.cat([rows[name][0] for name, _ in one.parts])[torch.from_numpy(one.layout.rows)] for one in shown
    ]
    embeddings[mask.to(model.device)] = torch.cat(of_prompts).to(embeddings.dtype)
    of_layers = [rows[name][1:] for one in shown for name, _ in one.parts if name in one.patches]
    added = [torch.cat(layer) for layer in zip(*of_layers, strict=True)]
    deepstack = {"visual_pos_masks": seen_mask.to(model.device), "deepstack_visual_embeds": added} if added else {}
    return {"inputs_embeds": embeddings, **deepstack}
