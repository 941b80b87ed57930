"""Answers to prompts with sounds and images from SGLang's own Qwen3-Omni, beside transformers'."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import sync
from tests.integration.rollout.weight_source import weights_of
from tests.kit.engines import Answer, EngineRunner
from tests.kit.sounds import make_omni_model, omni_logprobs, omni_prompt, sound, without_marks
from tests.kit.vision import Item, SoundClip, clip, picture

pytestmark = pytest.mark.night

TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_model(tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def engine(start: Callable[..., EngineRunner], source: Source) -> EngineRunner:
    runner = start()
    sync(runner, source, 0)
    return runner


def with_weights(model: Path, version: int, folder: Path) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    """Return transformers' model with a version's weights, read from files, because their names are the files'."""
    of_version = shutil.copytree(model, folder / str(version))
    save_file(weights_of(model, version), of_version / "model.safetensors", {"format": "pt"})
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(of_version, dtype=torch.float32).eval()


def gaps(right: torch.nn.Module, model: Path, prompt: list[int], answer: Answer, items: list[Item]) -> torch.Tensor:
    """Return by how much an answer's log-probs are off, [tokens]; tokens of media end the comparison."""
    tokens = without_marks(answer.tokens, model)
    return (torch.tensor(answer.logprobs[: len(tokens)]) - omni_logprobs(right, prompt, tokens, items)).abs()


def test_log_probs_equal_transformers_under_each_version(
    engine: EngineRunner, source: Source, model: Path, tmp_path: Path
) -> None:
    """Sounds of all lengths and videos, alone and with others, before and after the towers' weights change."""
    cases: list[tuple[list[Item], list[Item]]] = [
        ([sound(0.4)], [sound(0.4, 9)]),
        ([sound(1.0, 1)], [sound(1.0, 9)]),
        ([sound(2.3, 2)], [sound(2.3, 9)]),
        ([sound(2.3, 3), picture(64, 64, 1), sound(0.4)], [sound(0.4), picture(64, 64, 1), sound(2.3, 3)]),
        ([clip(6, 96, 64, 1)], [clip(6, 96, 64, 9)]),
        ([clip(4, 64, 64, 2), sound(1.0, 1), picture(64, 96)], [clip(4, 64, 64, 9), sound(1.0, 1), picture(64, 96)]),
        ([SoundClip(clip(6, 96, 64, 3), sound(2.3, 5))], [SoundClip(clip(6, 96, 64, 3), sound(2.3, 9))]),
        ([sound(21.0, 4)], [sound(21.0, 9)]),  # of so many tokens that a prompt is computed once for all samples
    ]
    prompts = [omni_prompt(model, items) for items, _ in cases]
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    compared = 0
    for version in (1, 2):
        sync(engine, source, version)
        right = with_weights(model, version, tmp_path)
        going = [engine.ask(prompt, 3, media=media, **sampling) for prompt, media in prompts]
        for (prompt, _), (items, others), asked in zip(prompts, cases, going, strict=True):
            answers = engine.wait(asked)
            assert [answer.versions for answer in answers] == [[version] * TOKENS] * 3
            off = torch.cat([gaps(right, model, prompt, answer, items) for answer in answers])
            assert (off < 2e-5).all()
            compared += len(off)
            if len(items) == 1 and len(off):
                assert torch.cat([gaps(right, model, prompt, answer, others) for answer in answers]).max() > 1e-3
    assert compared > 150


def test_equal_tokens_with_other_sounds_are_another_prompt(engine: EngineRunner, model: Path, tmp_path: Path) -> None:
    """Asked together, and again when their keys and values are cached."""
    assert engine.engine.weights is not None
    right = with_weights(model, engine.engine.weights.version, tmp_path)
    sounds: list[list[Item]] = [[sound(21.0, seed)] for seed in (1, 2)]
    asked = [omni_prompt(model, one) for one in sounds]
    assert asked[0][0] == asked[1][0]
    compared = 0
    for _ in range(2):
        going = [engine.ask(prompt, 3, media=media, max_new_tokens=8, ignore_eos=True) for prompt, media in asked]
        for (prompt, _), one, each in zip(asked, sounds, going, strict=True):
            for answer in engine.wait(each):
                off = gaps(right, model, prompt, answer, one)
                assert (off < 2e-5).all()
                compared += len(off)
    assert compared > 20
