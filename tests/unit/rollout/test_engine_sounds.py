"""Answers to prompts with sounds and images from the transformers engine, beside transformers itself."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen3OmniMoeThinkerForConditionalGeneration

from relaxd.media.prompt_media import PromptMedia
from relaxd.weights.buckets import ManifestMismatch, TensorBucket, TensorSpec
from services.rollout.engines.request_types import Version
from services.rollout.engines.transformers.transformers_process import check_manifest, named_parameters
from tests.kit.sounds import make_omni_model, omni_logprobs, omni_prompt, sound, without_marks
from tests.kit.vision import Item, SoundClip, clip, picture
from tests.unit.rollout.engine_harness import Harness

LONG, OTHER, SHORT = sound(1.31, 1), sound(1.31, 2), sound(0.43, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_model(tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def harness(folder: Path) -> Iterator[Harness]:
    harness = Harness(folder)
    yield harness
    harness.engine.stop()


def test_log_probs_equal_transformers(harness: Harness, reference: PreTrainedModel, folder: Path) -> None:
    """Prompts with sounds, images, videos with and without sounds of their own, all of them and none, in one batch.

    The short sound is one that transformers gets alone.
    """
    prompts: dict[str, list[Item]] = {
        "one": [LONG],
        "short": [SHORT],
        "none": [],
        "two": [LONG, sound(2.05, 4)],
        "image": [picture(100, 60)],
        "mixed": [picture(64, 64, 1), LONG, picture(70, 150, 2), OTHER],
        "twice": [LONG, LONG],
        "video": [clip(6, 96, 64)],
        "own": [SoundClip(clip(6, 96, 64, 3), LONG)],
        "longer": [OTHER, SoundClip(clip(4, 64, 64, 4), sound(4.2, 5)), picture(64, 64)],
        "two own": [SoundClip(clip(4, 64, 96, 5), LONG), SoundClip(clip(2, 64, 64, 6), OTHER)],
        "all": [clip(4, 64, 64, 1), LONG, picture(70, 150, 2), clip(10, 64, 96, 2)],
    }
    for number, (name, items) in enumerate(prompts.items()):
        prompt, media = omni_prompt(folder, items)
        harness.submit(name, prompt, 2, media=media, max_new_tokens=12 - number, seed=number, ignore_eos=True)
    compared = 0
    for name, items in prompts.items():
        prompt, _ = omni_prompt(folder, items)
        for answer in harness.wait(name, 2):
            tokens = without_marks(answer.tokens, folder)
            full = omni_logprobs(reference, prompt, tokens, items)
            np.testing.assert_allclose(answer.logprobs[: len(tokens)], full, atol=1e-5, err_msg=name)
            compared += len(tokens)
    assert compared > 80


def test_another_sound_of_the_same_length_is_another_prompt(
    harness: Harness, reference: PreTrainedModel, folder: Path
) -> None:
    prompt, media = omni_prompt(folder, [LONG])
    assert omni_prompt(folder, [OTHER])[0] == prompt
    harness.submit("one", prompt, media=media, max_new_tokens=8, seed=1, ignore_eos=True)
    (answer,) = harness.wait("one")
    tokens = without_marks(answer.tokens, folder)
    own, other = (omni_logprobs(reference, prompt, tokens, [one]).numpy() for one in (LONG, OTHER))
    np.testing.assert_allclose(answer.logprobs[: len(tokens)], own, atol=1e-5)
    assert np.abs(own - other).max() > 1e-3


def test_a_request_whose_sounds_are_wrong_fails_alone(harness: Harness, folder: Path) -> None:
    prompt, media = omni_prompt(folder, [LONG])
    other, image = omni_prompt(folder, [SHORT])[1], omni_prompt(folder, [picture(64, 64)])[1]
    misfit = PromptMedia(({**media.records[0], "grid": [132]},), media.contents)
    kind = PromptMedia(({**media.records[0], "kind": "image"},), media.contents)
    clip_prompt, own = omni_prompt(folder, [SoundClip(clip(4, 64, 64), LONG)])
    lost = own.contents[: own.contents.index(b"RIFF")]
    silent, timeless, backwards, small = (
        PromptMedia(({**own.records[0], **changed},), contents)
        for changed, contents in (
            ({"bytes": len(lost)}, lost),
            ({"times": []}, own.contents),
            ({"times": [0.0, -1.0]}, own.contents),
            ({"grid": [1, 1, 1, 131]}, own.contents),
        )
    )
    wrong = {
        "silent": (silent, "is a broken sound"),
        "timeless": (timeless, "has a video with the grid [2, 4, 4, 131], but 0 times"),
        "backwards": (backwards, "has a video with the times [0.0, -1.0]: they must begin at 0 and never go back"),
        "small": (small, "has an item with the grid [1, 1, 1, 131]: its rows and columns must be multiples of the 2"),
        "other": (other, "tokens of media, but its items have"),
        "image": (image, "tokens of media, but its items have"),
        "grid": (misfit, "which don't fit its 132 frames"),
        "kind": (kind, "can't be used"),
        "broken": (PromptMedia(media.records, b"x" * len(media.contents)), "is a broken sound"),
    }
    for name, (given, _) in wrong.items():
        tokens = clip_prompt if given.records[0]["kind"] == "video" else prompt
        harness.submit(name, tokens, media=given, max_new_tokens=4)
    harness.submit("right", prompt, media=media, max_new_tokens=4)
    harness.wait("right")
    for name, (_, complaint) in wrong.items():
        assert complaint in harness.failures[name]
    assert harness.wrong_media == wrong.keys()


def test_weights_have_the_names_of_files_and_reach_both_towers(harness: Harness, folder: Path, tmp_path: Path) -> None:
    files = load_file(make_omni_model(tmp_path, seed=2) / "model.safetensors")
    own = named_parameters(harness.model)
    assert own.keys() == files.keys()
    assert {name: tuple(one.shape) for name, one in own.items()} == {
        name: tuple(one.shape) for name, one in files.items()
    }
    specs = [TensorSpec(name, one.dtype, tuple(one.shape)) for name, one in own.items()]
    towers = [one for one in specs if one.name.startswith(("thinker.visual.", "thinker.audio_tower."))]
    language = [one for one in specs if one not in towers]
    for given in (specs, language):
        check_manifest(harness.model, [TensorBucket(tuple(given), 0)])
    with pytest.raises(ManifestMismatch, match=r"thinker\..*the manifest does not have this tensor"):
        check_manifest(harness.model, [TensorBucket(tuple(language + towers[1:]), 0)])
    prompt, media = omni_prompt(folder, [LONG, picture(64, 64)])
    harness.engine.pause("in_place", 60, 20)
    with harness.engine.update(Version(1, 1)):
        harness.engine.gate.touch()
        for name, tensor in own.items():
            tensor.copy_(files[name])
    harness.engine.gate.confirm(Version(1, 1))
    harness.engine.gate.resume()
    harness.submit("new", prompt, media=media, max_new_tokens=4, ignore_eos=True)
    (answer,) = harness.wait("new")
    tokens = without_marks(answer.tokens, folder)
    new = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    full = omni_logprobs(new, prompt, tokens, [LONG, picture(64, 64)])
    np.testing.assert_allclose(answer.logprobs[: len(tokens)], full, atol=1e-5)
