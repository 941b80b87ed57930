"""Prompts with images and videos in the SGLang engine on a GPU: log-probs beside transformers', text as the control.

In bfloat16 only: SGLang's normalisation has no float32 there. tests/integration/rollout/sglang/test_sglang_images.py
compares in float32, on a CPU.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang.srt")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from PIL import Image
from transformers import PreTrainedModel, Qwen3VLForConditionalGeneration

from relaxd.data.vision import VisionModel, read_vision
from tests.gpu.media_engine import BUCKET_BYTES, LARGEST, MEAN, TOKENS, media_engine
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import sync
from tests.integration.rollout.weight_source import weights_of
from tests.kit.engines import EngineRunner, reference_logprobs
from tests.kit.media_run import EYES, TEXT
from tests.kit.vision import (
    Item,
    clip,
    image_logprobs,
    make_vision_model,
    picture,
    prompt_with_media,
    without_media,
)

CASES: dict[str, list[Item]] = {
    "text": [],
    "one image": [picture(256, 250, 3)],
    "three images": [picture(100, 60), picture(64, 64, 1), picture(70, 150, 2)],
    "one video": [clip(24, 96, 96, 8)],
    "videos and an image": [clip(3, 64, 64, 6), picture(64, 64, 1), clip(4, 96, 64, 7)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("seeing"), noise=0.06, tower=EYES, **TEXT)


@pytest.fixture(scope="module")
def vision(model: Path) -> VisionModel:
    return read_vision(model)


@pytest.fixture(scope="module")
def source(model: Path) -> Iterator[Source]:
    source = Source(model, BUCKET_BYTES)
    yield source
    source.close()


@pytest.fixture(scope="module")
def engine(model: Path, source: Source) -> Iterator[EngineRunner]:
    with media_engine(model, source) as runner:
        yield runner


def reference(model: Path, version: int) -> PreTrainedModel:
    """Transformers in float32 with the weights of a version as the engine has them, in bfloat16."""
    found = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.bfloat16).eval()
    found.load_state_dict(weights_of(model, version), strict=False)
    return found.float().cuda()


def unlike(item: Item, seed: int) -> Item:
    """Another picture, or clip, of the same size."""
    if isinstance(item, Image.Image):
        return picture(*item.size, seed)
    width, height = item[0].size
    return clip(len(item), width, height, seed)


def prompt_of(vision: VisionModel, pictures: list[Item]) -> tuple[list[int], dict[str, object]]:
    """A prompt, and what its request has beside it."""
    if not pictures:
        return list(range(40, 140)), {}
    prompt, media = prompt_with_media(vision, pictures)
    return prompt, {"media": media}


def test_log_probs_are_those_of_transformers_under_each_version(
    engine: EngineRunner, source: Source, model: Path, vision: VisionModel, facts: Callable[[str, object], None]
) -> None:
    """The second version has another tower, too: neither cached features nor cached keys outlive the first."""
    assert engine.engine.device == "cuda"
    for version in (1, 2):
        if version > 1:
            sync(engine, source, version)
        right = reference(model, version)
        for name, pictures in CASES.items():
            prompt, more = prompt_of(vision, pictures)
            differences, other = [], []
            for answer in engine.generate(prompt, 4, max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True, **more):
                assert answer.versions == [version] * TOKENS
                tokens = without_media(answer.tokens, vision)
                got = torch.tensor(answer.logprobs[: len(tokens)]).double()
                if not pictures:
                    differences.append((reference_logprobs(right, prompt, tokens) - got).abs())
                    continue
                differences.append((image_logprobs(right, prompt, tokens, pictures).double() - got).abs())
                others = [unlike(one, 90 + number) for number, one in enumerate(pictures)]
                other.append((image_logprobs(right, prompt, tokens, others).double() - got).abs())
            found = torch.cat(differences)
            facts(f"{name} {version}", f"{found.mean():.3f} to {found.max():.3f}")
            if other:
                facts("as if other pictures", float(torch.cat(other).mean()))
                assert torch.cat(other).mean() > 2 * MEAN
            assert found.mean() < MEAN
            assert found.max() < LARGEST


def test_prompts_with_equal_tokens_and_other_pictures_are_others(
    engine: EngineRunner, model: Path, vision: VisionModel
) -> None:
    """Asked together, and again when their keys and values are cached: each answer is to its own picture."""
    pictures: list[list[Item]] = [[picture(256, 250, seed)] for seed in (1, 2)]
    asked = [prompt_with_media(vision, one) for one in pictures]
    assert asked[0][0] == asked[1][0]
    assert engine.engine.weights is not None
    right = reference(model, engine.engine.weights.version)
    for _ in range(2):
        going = [
            engine.ask(prompt, 2, media=media, max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True)
            for prompt, media in asked
        ]
        for own, other, each in zip(pictures, reversed(pictures), going, strict=True):
            for answer in engine.wait(each):
                tokens = without_media(answer.tokens, vision)
                got = torch.tensor(answer.logprobs[: len(tokens)]).double()
                under = [image_logprobs(right, asked[0][0], tokens, one).double() for one in (own, other)]
                own_gap, other_gap = ((one - got).abs().mean() for one in under)
                assert own_gap < MEAN < 2 * MEAN < other_gap
