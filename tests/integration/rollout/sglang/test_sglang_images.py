"""Answers to prompts with images from SGLang's own Qwen3-VL, beside transformers'."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from relaxd.data.vision import VisionModel, read_vision
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import sync
from tests.integration.rollout.weight_source import weights_of
from tests.kit.engines import Answer, EngineRunner
from tests.kit.vision import image_logprobs, make_vision_model, picture, prompt_with_images, without_images

PICTURES = [picture(100, 60), picture(64, 64, 1), picture(70, 150, 2)]
LARGE = [picture(256, 250, 3), picture(64, 64, 4)]
"""So many tokens that a prompt is computed once for all samples."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def vision(model: Path) -> VisionModel:
    return read_vision(model)


@pytest.fixture(scope="module")
def engine(start: Callable[..., EngineRunner], source: Source) -> EngineRunner:
    runner = start()
    sync(runner, source, 0)
    return runner


def check(model: Path, vision: VisionModel, prompt: list[int], answer: Answer, pictures: list[Image.Image]) -> int:
    """Compare an answer with transformers under the weights that it is said to be of; returns its tokens compared."""
    (version,) = set(answer.versions)
    reference = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    reference.load_state_dict(weights_of(model, version), strict=False)
    tokens = without_images(answer.tokens, vision)
    right = image_logprobs(reference, prompt, tokens, pictures)
    torch.testing.assert_close(torch.tensor(answer.logprobs[: len(tokens)]), right, atol=2e-5, rtol=0)
    return len(tokens)


def test_log_probs_equal_transformers_under_each_version(
    engine: EngineRunner, source: Source, model: Path, vision: VisionModel
) -> None:
    """Of prompts with one to three images, in groups, before and after the tower's weights change."""
    compared = 0
    for version in (1, 2):
        sync(engine, source, version)
        for pictures in (PICTURES, PICTURES[1:2], [PICTURES[0], PICTURES[1], PICTURES[0]], LARGE):
            prompt, media = prompt_with_images(vision, pictures)
            for answer in engine.generate(prompt, 3, media=media, max_new_tokens=12, temperature=1.0, ignore_eos=True):
                assert answer.versions == [version] * 12
                compared += check(model, vision, prompt, answer, pictures)
    assert compared > 100
