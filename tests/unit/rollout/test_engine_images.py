"""Answers to prompts with images and videos from the transformers engine, beside transformers itself."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from relaxd.data.vision import VisionModel, read_vision
from relaxd.media.prompt_media import PromptMedia
from relaxd.weights.buckets import ManifestMismatch, TensorBucket, TensorSpec
from services.rollout.engines.request_types import Version
from services.rollout.engines.transformers.transformers_process import check_manifest, named_parameters
from tests.kit.vision import (
    EXPERTS,
    Item,
    clip,
    image_logprobs,
    make_vision_model,
    normal_media,
    picture,
    prompt_with_media,
    without_media,
)
from tests.unit.rollout.engine_harness import Answer, Harness, full_logprobs

PICTURES = [picture(100, 60), picture(64, 64, 1), picture(70, 150, 2)]
CLIP = clip(6, 64, 96, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def vision(folder: Path) -> VisionModel:
    return read_vision(folder)


@pytest.fixture
def harness(folder: Path) -> Iterator[Harness]:
    harness = Harness(folder)
    yield harness
    harness.engine.stop()


def test_log_probs_equal_transformers(harness: Harness, reference: PreTrainedModel, vision: VisionModel) -> None:
    """Prompts with none to three items, of different lengths, in one batch; others join it while it runs."""
    counts: dict[str, list[Item]] = {
        "three": [*PICTURES],
        "one": [PICTURES[1]],
        "none": [],
        "video": [CLIP],
        "twice": [PICTURES[0], PICTURES[1], PICTURES[0]],
        "mixed": [CLIP, PICTURES[1], clip(3, 64, 64, 4)],
    }
    for number, (name, pictures) in enumerate(counts.items()):
        prompt, media = prompt_with_media(vision, pictures)
        harness.submit(name, prompt, 2, media=media, max_new_tokens=12 - number, seed=number, ignore_eos=True)
        if number == 1:
            harness.wait_for_tokens("three", 4)
    compared = 0
    for name, pictures in counts.items():
        prompt, _ = prompt_with_media(vision, pictures)
        for answer in harness.wait(name, 2):
            tokens = without_media(answer.tokens, vision)
            full = (
                image_logprobs(reference, prompt, tokens, pictures)
                if pictures
                else full_logprobs(reference, prompt, tokens)
            )
            np.testing.assert_allclose(answer.logprobs[: len(tokens)], full.float(), atol=1e-5)
            compared += len(tokens)
    assert compared > 60


@pytest.mark.night  # a further model
def test_a_mixture_answers_as_transformers_does(tmp_path: Path) -> None:
    harness = Harness(make_vision_model(tmp_path, model_type="qwen3_vl_moe", **EXPERTS))
    vision = read_vision(tmp_path)
    prompt, media = prompt_with_media(vision, [PICTURES[0], CLIP])
    harness.submit("mixed", prompt, 2, media=media, max_new_tokens=8, ignore_eos=True)
    reference = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for answer in harness.wait("mixed", 2):
        tokens = without_media(answer.tokens, vision)
        full = image_logprobs(reference, prompt, tokens, [PICTURES[0], CLIP])
        np.testing.assert_allclose(answer.logprobs[: len(tokens)], full.float(), atol=1e-5)
    harness.engine.stop()


def test_a_video_with_its_frames_in_another_order_is_another_one(
    harness: Harness, reference: PreTrainedModel, vision: VisionModel
) -> None:
    swapped = [CLIP[index] for index in (1, 0, 2, 3, 4, 5)]  # the first two make up one time
    prompt, media = prompt_with_media(vision, [CLIP])
    assert prompt_with_media(vision, [swapped])[0] == prompt
    harness.submit("video", prompt, media=media, max_new_tokens=8, ignore_eos=True)
    (answer,) = harness.wait("video")
    tokens = without_media(answer.tokens, vision)
    own, other = (image_logprobs(reference, prompt, tokens, [frames]).numpy() for frames in (CLIP, swapped))
    np.testing.assert_allclose(answer.logprobs[: len(tokens)], own, atol=1e-5)
    assert np.abs(own - other).max() > 1e-3


def test_other_pictures_of_the_same_size_are_another_prompt(harness: Harness, vision: VisionModel) -> None:
    answers: list[Answer] = []
    for seed in (1, 2):
        prompt, media = prompt_with_media(vision, [picture(64, 64, seed)])
        harness.submit(str(seed), prompt, media=media, max_new_tokens=4, temperature=0)
        answers += harness.wait(str(seed))
    assert not np.allclose(answers[0].logprobs[:1], answers[1].logprobs[:1], atol=1e-4)


def test_answers_go_on_whatever_they_have_sampled(
    harness: Harness, reference: PreTrainedModel, vision: VisionModel
) -> None:
    prompt, media = prompt_with_media(vision, PICTURES[:1])
    harness.submit("whole", prompt, media=media, max_new_tokens=8, seed=3, ignore_eos=True)
    (whole,) = harness.wait("whole")
    harness.submit(
        "rest",
        *(prompt, 1),
        media=media,
        begun={0: tuple(whole.tokens[:5])},
        max_new_tokens=8,
        seed=3,
        ignore_eos=True,
    )
    (rest,) = harness.wait("rest")
    assert rest.tokens == whole.tokens[5:]
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[5:], atol=1e-5)
    # An image token that was sampled is a token like any other.
    begun = (7, vision.tokens.token, 8)
    harness.submit("odd", prompt, media=media, begun={0: begun}, max_new_tokens=6, ignore_eos=True)
    (odd,) = harness.wait("odd")
    assert len(odd.tokens) == 3


def test_a_request_whose_images_are_wrong_fails_alone(harness: Harness, vision: VisionModel) -> None:
    prompt, media = prompt_with_media(vision, PICTURES[:1])
    other = prompt_with_media(vision, PICTURES[1:2])[1]
    misfit, none = (
        PromptMedia(({**media.records[0], "grid": grid},), media.contents) for grid in ([1, 2, 12], [0, 4, 6])
    )
    many = PromptMedia.of(normal_media(vision, [picture(96, 192)]))  # three frames for one time
    three = PromptMedia(({**many.records[0], "grid": [1, 4, 6]},), many.contents)
    wrong = {
        "more tokens": ([*prompt, vision.tokens.token], media, "tokens of media, but its items have"),
        "other": (prompt, other, "tokens of media, but its items have"),
        "cut": (prompt, PromptMedia(media.records, media.contents[:-1]), "bytes of media, but prompt_media says"),
        "broken": (prompt, PromptMedia(media.records, b"x" * len(media.contents)), "can't be used: cannot identify"),
        "grid": (prompt, misfit, "don't fit its grid"),
        "none": (prompt, none, "grid [0, 4, 6]: it must have 1, 3 or 4 numbers of at least 1"),
        "three": (prompt, three, "has 3 frames for each of its times: a video has 2"),
    }
    for name, (tokens, given, _) in wrong.items():
        harness.submit(name, tokens, media=given, max_new_tokens=4)
    harness.submit("right", prompt, media=media, max_new_tokens=4)
    harness.wait("right")
    for name, (_, _, complaint) in wrong.items():
        assert complaint in harness.failures[name]


def test_weights_reach_language_model_and_tower_under_their_names(
    harness: Harness, vision: VisionModel, tmp_path: Path
) -> None:
    other = make_vision_model(tmp_path, seed=2)
    new = AutoModelForImageTextToText.from_pretrained(other, dtype=torch.float32).eval()
    prompt, media = prompt_with_media(vision, PICTURES[:2])
    harness.set_weights(Version(1, 1), new.state_dict())
    harness.submit("new", prompt, media=media, max_new_tokens=4, ignore_eos=True)
    (answer,) = harness.wait("new")
    tokens = without_media(answer.tokens, vision)
    assert tokens
    full = image_logprobs(new, prompt, tokens, PICTURES[:2])
    np.testing.assert_allclose(answer.logprobs[: len(tokens)], full, atol=1e-5)


def test_manifests_may_leave_out_the_whole_tower_only(harness: Harness) -> None:
    specs = [TensorSpec(name, one.dtype, tuple(one.shape)) for name, one in named_parameters(harness.model).items()]
    towers = [one for one in specs if one.name.startswith("model.visual.")]
    language = [one for one in specs if one not in towers]
    for given in (specs, language):
        check_manifest(harness.model, [TensorBucket(tuple(given), 0)])
    for given, missing in (
        (language + towers[1:], "model.visual.*"),
        (towers + language[3:], "model.language_model.*"),
    ):
        with pytest.raises(ManifestMismatch, match=rf"{missing}the manifest does not have this tensor"):
            check_manifest(harness.model, [TensorBucket(tuple(given), 0)])
