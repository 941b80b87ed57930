"""Qwen3-Omni's thinker with sounds, images and video in packed rows, against transformers' own pass of each sample."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration

from relaxd.data.vision import read_vision
from relaxd.media.videos import frames_of
from services.trainer.batch.sequence_media import DecodedItem
from tests.integration.trainer.learner.image_worlds import Job, make_samples, run_job
from tests.integration.trainer.learner.media_layouts import ALL, check_layouts
from tests.kit.sounds import features_of, make_omni_model
from tests.kit.vision import Item, seen_by_transformers

TOWERS = ("thinker.visual.", "thinker.audio_tower.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[], tuple[np.ndarray, dict[str, torch.Tensor]]]:
    return cache(lambda: compute_reference(folder))


def compute_reference(folder: Path) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probs of the trained tokens, and gradients of PPO's objective where the ratio is 1, by transformers.

    Its own positions of the prompt, patches, features and towers, which get each sound alone. An answer's token of
    sound is text, as it isn't for transformers.
    """
    whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    thinker = whole.thinker
    model, config, found, loss = thinker.model, thinker.config, [], torch.zeros(())
    for sample in make_samples(read_vision(folder)):
        ids, prompt = (
            torch.from_numpy(sample.tokens)[None],
            torch.from_numpy(sample.tokens[: sample.prompt_length])[None],
        )
        embeddings, more, seen = model.get_input_embeddings()(ids), {}, {}
        lengths: torch.Tensor | None = None
        in_prompt = torch.arange(ids.shape[1]) < sample.prompt_length
        items = sample.media.items if sample.media is not None else ()
        waves = [item.values if item.kind == "audio" else item.sound for item in items]
        has_own = any(item.sound is not None for item in items)
        if sounds := [features_of(one) for one in waves if one is not None]:
            lengths = torch.tensor([one.shape[1] for one in sounds])
            rows = [
                model.audio_tower(one, feature_lens=own[None], return_dict=True).last_hidden_state
                for one, own in zip(sounds, lengths, strict=True)
            ]
            place = ((ids == config.audio_token_id) & in_prompt)[..., None]
            embeddings = embeddings.masked_scatter(place, torch.cat(rows))
        if shown := [item_of(item) for item in items if item.kind != "audio"]:
            seen = seen_by_transformers(shown)
            outputs = [look(model, seen_by_transformers([one])) for one in shown]
            is_shown = ((ids == config.image_token_id) | (ids == config.video_token_id)) & in_prompt
            rows = [torch.cat(list(own.pooler_output)) for own in outputs]
            embeddings = embeddings.masked_scatter(is_shown[..., None], torch.cat(rows))
            layers = zip(*(own.deepstack_features for own in outputs), strict=True)
            deep = [torch.cat([one for own in layer for one in own]) for layer in layers]
            more = {"visual_pos_masks": is_shown, "deepstack_visual_embeds": deep}
        grids = seen.get("image_grid_thw"), seen.get("video_grid_thw")
        seconds = None if grids[1] is None else torch.ones(len(grids[1]))
        position, delta = thinker.get_rope_index(prompt, *grids, torch.ones_like(prompt), has_own, lengths, seconds)
        behind = torch.arange(sample.prompt_length, ids.shape[1]) + delta.flatten()[0]
        position = torch.cat([position, behind.expand(3, 1, -1).to(position.dtype)], dim=2)
        hidden = model.language_model(inputs_embeds=embeddings, position_ids=position, **more).last_hidden_state
        logprobs = thinker.lm_head(hidden)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        logprobs = logprobs[torch.from_numpy(sample.loss_mask)[1:] == 1]
        advantages = torch.from_numpy(sample.columns["advantages"][sample.loss_mask == 1])
        found.append(logprobs.detach().numpy())
        loss = loss - (logprobs * advantages).sum()
    loss.backward()
    return np.concatenate(found), file_gradients(thinker)


def item_of(item: DecodedItem) -> Item:
    """Return a picture, or the frames of a clip."""
    image = PIL.Image.fromarray(item.values)
    return image if item.kind == "image" else frames_of(image, 2 * item.grid[0])


def look(model: Any, seen: dict[str, torch.Tensor]) -> Any:
    """Return the tower's output for a picture or a clip, alone."""
    if "pixel_values" in seen:
        return model.get_image_features(seen["pixel_values"], seen["image_grid_thw"], return_dict=True)
    return model.get_video_features(seen["pixel_values_videos"], seen["video_grid_thw"], return_dict=True)


def file_gradients(thinker: Qwen3OmniMoeThinkerForConditionalGeneration) -> dict[str, torch.Tensor]:
    """Return gradients by the names that files have, with experts one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in thinker.named_parameters():
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        name = "thinker." + name.replace("model.audio_tower.", "audio_tower.")
        gradient, stem = parameter.grad, name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(gradient):
                gate, up = both.chunk(2)
                found |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found |= {f"{stem}.{expert}.down_proj.weight": down for expert, down in enumerate(gradient)}
        else:
            found[name] = gradient
    return found


@pytest.mark.parametrize("settings", [ALL, {**ALL, "recompute": "full"}], ids=["plain", "recomputed"])
def test_log_probs_and_gradients_equal_those_of_transformers(
    folder: Path, reference: Callable[[], Any], alone: None, settings: dict[str, Any]
) -> None:
    logprobs, gradients = reference()
    found = run_job(Job(folder, settings))
    assert found["images"] == [4, 11]
    np.testing.assert_allclose(found["logprobs"], logprobs, atol=1e-5)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in found["gradients"].items():
        difference = np.linalg.norm(gradient - gradients[name].numpy())
        # Biases of keys have no gradient but rounding.
        assert difference <= 1e-4 * np.linalg.norm(gradients[name].numpy()) + 5e-7, name


def test_other_sounds_of_the_same_lengths_give_other_log_probs(
    folder: Path, reference: Callable[[], Any], alone: None
) -> None:
    found = run_job(Job(folder, swapped=True))
    assert np.abs(found["logprobs"] - reference()[0]).max() > 0.01


def test_the_towers_are_frozen_by_default_and_written_as_they_were(folder: Path, alone: None, tmp_path: Path) -> None:
    found = run_job(Job(folder, steps=1, save=tmp_path / "saved"))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys() == found["tensors"].keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith(TOWERS)
    }
    assert not {name for name in found["trained"] if name.startswith("towers.")}
    _, loading = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


@pytest.mark.night  # every layout
def test_two_ranks_train_as_one_does(folder: Path, alone: None, tmp_path: Path) -> None:
    names = ("TP2", "TP2 recomputed", "CP2", "PP2 of 3 and 1", "DP2", "DP2 overlapped", "EP2")
    check_layouts({folder: names}, tmp_path / "world")
