"""Media of prompts on their way into a transformers model: embeddings with the rows of its towers."""

from collections.abc import Sequence
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
from relaxd.data.tower_inputs import normalised, spectrogram
from relaxd.data.vision import VisionModel
from relaxd.media import Grid
from relaxd.media.media_tokens import IMAGE, TEXT, VIDEO
from services.rollout.engines.seen_prompts import SeenPrompt, read_model_vision

TOWERS = ("model.visual.", "model.audio_tower.")
"""Beginnings of the names of towers' parameters."""
THINKERS = {"qwen3_omni_moe": Qwen3OmniMoeThinkerForConditionalGeneration}
"""Classes of the text-writing part of a model, for types with further parts, such as Qwen3-Omni's talker."""


def load_model(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, VisionModel | None]:
    """Return a model, and its rules for media if it takes any. Raises DataError if the rules are missing or damaged."""
    vision = read_model_vision(folder, "transformers")
    usual = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    kind: Any = THINKERS.get(str(read_object(folder / "config.json").get("model_type")), usual)
    return kind.from_pretrained(folder, dtype=dtype).eval(), vision


def embed(
    model: PreTrainedModel, ids: torch.Tensor, prompts: Sequence[SeenPrompt | None], paddings: Sequence[int]
) -> dict[str, Any]:
    """Return the language model's inputs for ids [rows, T]: embeddings, with those of media in their places.

    The towers get each item once. Items are in their places in the prompt, not where tokens of media are: an answer
    that goes on may have these, too.
    """
    body: Any = model.model
    shown: list[SeenPrompt] = []
    seen_order: list[str] = []
    mask, seen_mask = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(2))
    rows: dict[str, torch.Tensor] = {}
    grids: dict[str, Grid] = {}
    patches: dict[str, torch.Tensor] = {}
    for row, prompt in enumerate(prompts):
        if prompt is None:
            continue
        shown.append(prompt)
        seen_order += [name for name, _ in prompt.parts if name in prompt.patches]
        grids |= prompt.parts
        cut = {name: torch.from_numpy(one).to(model.device) for name, one in prompt.patches.items()}
        patches |= {name: normalised(one, prompt.vision) for name, one in cut.items()}
        rows |= {name: _heard(body, one, prompt) for name, one in prompt.sounds.items() if name not in rows}
        own = slice(paddings[row], paddings[row] + len(prompt.layout.tokens))
        mask[row, own] = torch.from_numpy(prompt.layout.modality != TEXT)
        seen_mask[row, own] = torch.from_numpy(np.isin(prompt.layout.modality, (IMAGE, VIDEO)))
    deepstack: dict[str, Any] = {}
    if patches:
        thw = torch.tensor([grids[name] for name in patches], device=model.device)
        found = body.get_image_features(torch.cat(list(patches.values())), thw, return_dict=True)
        rows |= zip(patches, found.pooler_output, strict=True)
        places = {name: place for place, name in enumerate(patches)}
        added = [
            torch.cat([one[places[name]] for name in seen_order]) for one in getattr(found, "deepstack_features", ())
        ]
        if added:
            deepstack = {"visual_pos_masks": seen_mask.to(model.device), "deepstack_visual_embeds": added}
    embeddings = body.get_input_embeddings()(ids.to(model.device))
    of_prompts = [torch.cat([rows[name] for name, _ in one.parts])[torch.from_numpy(one.layout.rows)] for one in shown]
    embeddings[mask.to(model.device)] = torch.cat(of_prompts).to(embeddings.dtype)
    return {"inputs_embeds": embeddings, **deepstack}


def _heard(body: Any, samples: np.ndarray, prompt: SeenPrompt) -> torch.Tensor:
    """Return the tower's rows of a sound.

    It is alone: beside a longer one the tower would hear a sound of less than a second otherwise.
    """
    assert prompt.vision.sound is not None  # or the prompt would have been refused
    features = spectrogram(samples, prompt.vision.sound).to(body.device, body.dtype)
    lengths = torch.tensor([features.shape[1]], device=body.device)
    rows: torch.Tensor = body.audio_tower(features, feature_lens=lengths, return_dict=True).last_hidden_state
    return rows
