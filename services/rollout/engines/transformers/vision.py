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
from relaxd.media.cache import RecentItems
from relaxd.media.media_tokens import IMAGE, TEXT, VIDEO
from services.rollout.engines.seen_prompts import SeenPrompt, read_model_vision

TOWERS = ("model.visual.", "model.audio_tower.")
"""Beginnings of the names of towers' parameters."""
KEPT_BYTES = 1 << 30
"""Default maximum of cached outputs of towers, in bytes."""
THINKERS = {"qwen3_omni_moe": Qwen3OmniMoeThinkerForConditionalGeneration}
"""Classes of the text-writing part of a model, for types with further parts, such as Qwen3-Omni's talker."""


def load_model(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, VisionModel | None]:
    """Return a model, and its rules for media if it takes any. Raises DataError if the rules are missing or damaged."""
    vision = read_model_vision(folder, "transformers")
    usual = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    kind: Any = THINKERS.get(str(read_object(folder / "config.json").get("model_type")), usual)
    return kind.from_pretrained(folder, dtype=dtype).eval(), vision


class TowerOutputs:
    """Outputs of a model's towers by item, kept in memory until the towers' weights change. For one thread.

    Each item runs alone. So its output is bit for bit the same, whatever else is asked for and whether it was kept.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int = KEPT_BYTES) -> None:
        """Make it empty.

        Args:
            model: the model with the towers, if it has any.
            max_bytes: maximum size of the outputs that are kept, in bytes. 0: none is.
        """
        self._model: Any = model
        self._parameters = [one for name, one in model.named_parameters() if name.startswith(TOWERS)]
        self._kept: RecentItems[list[torch.Tensor]] = RecentItems(max_bytes)
        self._weights = -1
        self.runs = 0
        """Number of items that the towers have run for."""

    def of(self, prompts: Sequence[SeenPrompt]) -> dict[str, list[torch.Tensor]]:
        """Return the rows of the prompts' items by hash (`parts_of`), and of what is seen those for DeepStack behind.

        They are [rows, hidden] each, on the model's device.
        """
        # Whatever writes into the parameters counts there; weights that are received as they were aren't written.
        weights = sum(one._version for one in self._parameters)
        if weights != self._weights:
            self._kept.clear()
            self._weights = weights
        found: dict[str, list[torch.Tensor]] = {}
        for prompt in prompts:
            for name, grid in prompt.parts:
                if name in found:
                    continue
                if (rows := self._kept.get(name)) is None:
                    rows = self._hear(name, prompt) if name in prompt.sounds else self._see(name, grid, prompt)
                    self.runs += 1
                found[name] = rows
        for name, rows in found.items():
            self._kept.keep(name, rows, sum(one.nbytes for one in rows))
        return found

    def _see(self, name: str, grid: Grid, prompt: SeenPrompt) -> list[torch.Tensor]:
        patches = normalised(torch.from_numpy(prompt.patches[name]).to(self._model.device), prompt.vision)
        thw = torch.tensor([grid], device=patches.device)
        seen = self._model.model.get_image_features(patches, thw, return_dict=True)
        return [seen.pooler_output[0], *(one[0] for one in getattr(seen, "deepstack_features", ()))]

    def _hear(self, name: str, prompt: SeenPrompt) -> list[torch.Tensor]:
        assert prompt.vision.sound is not None  # or the prompt would have been refused
        body = self._model.model
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
    """Return the language model's inputs for ids [rows, T]: embeddings, with those of media in their places.

    Items are in their places in the prompt, not where tokens of media are: an answer that goes on may have these, too.
    """
    shown = [prompt for prompt in prompts if prompt is not None]
    rows = towers.of(shown)
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
