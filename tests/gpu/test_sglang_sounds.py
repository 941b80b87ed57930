"""Prompts with sounds and images in the SGLang engine on a GPU: log-probs beside transformers', text as the control.

In bfloat16 only: SGLang's normalisation has no float32 there. tests/integration/rollout/sglang/test_sglang_sounds.py
compares in float32, on a CPU. Each token has all experts: a choice between two that are nearly alike would
hide the rest.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sglang.srt")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen3OmniMoeThinkerForConditionalGeneration

from tests.gpu.media_engine import BUCKET_BYTES, LARGEST, MEAN, TOKENS, media_engine
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import sync
from tests.integration.rollout.weight_source import weights_of
from tests.kit.engines import EngineRunner
from tests.kit.media_run import EYES, HEARS, TEXT
from tests.kit.sounds import make_omni_model, omni_logprobs, omni_prompt, sound, without_marks
from tests.kit.vision import Item, picture

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
CASES: dict[str, tuple[list[Item], list[Item]]] = {
    "text": ([], []),
    "sound, 0.4 s": ([sound(0.4)], [sound(0.4, 9)]),
    "sound, 2.3 s": ([sound(2.3, 2)], [sound(2.3, 9)]),
    "sound, 21 s": ([sound(21.0, 4)], [sound(21.0, 9)]),
    "two and an image": (
        [sound(2.3, 3), picture(64, 64, 1), sound(0.4)],
        [sound(2.3, 8), picture(64, 64, 7), sound(0.4, 9)],
    ),
}
"""Items of a prompt, and others of the same sizes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing")
    return make_omni_model(folder, noise=0.06, hearing_noise=0.3, tower=EYES, ears=HEARS, **TEXT, **EXPERTS)


@pytest.fixture(scope="module")
def source(model: Path) -> Iterator[Source]:
    source = Source(model, BUCKET_BYTES)
    yield source
    source.close()


@pytest.fixture(scope="module")
def engine(model: Path, source: Source) -> Iterator[EngineRunner]:
    with media_engine(model, source) as runner:
        yield runner


def reference(model: Path, version: int, folder: Path) -> PreTrainedModel:
    """Transformers in float32 with the weights of a version as the engine has them, in bfloat16."""
    of_version = shutil.copytree(model, folder / str(version))
    rounded = {name: tensor.bfloat16() for name, tensor in weights_of(model, version).items()}
    save_file(rounded, of_version / "model.safetensors", {"format": "pt"})
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(of_version, dtype=torch.float32).eval()


def test_log_probs_are_those_of_transformers_under_each_version(
    engine: EngineRunner, source: Source, model: Path, tmp_path: Path, facts: Callable[[str, object], None]
) -> None:
    """The second version has other towers, too: neither cached features nor cached keys outlive the first."""
    assert engine.engine.device == "cuda"
    for version in (1, 2):
        if version > 1:
            sync(engine, source, version)
        right = reference(model, version, tmp_path)
        for name, (items, others) in CASES.items():
            prompt, media = omni_prompt(model, items)
            more = {"media": media} if items else {}
            differences, other = [], []
            for answer in engine.generate(prompt, 4, max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True, **more):
                assert answer.versions == [version] * TOKENS
                tokens = without_marks(answer.tokens, model)
                got = np.array(answer.logprobs[: len(tokens)])
                differences.append(np.abs(omni_logprobs(right, prompt, tokens, items).double().numpy() - got))
                if items:
                    other.append(np.abs(omni_logprobs(right, prompt, tokens, others).double().numpy() - got))
            found = np.concatenate(differences)
            facts(f"{name} {version}", f"{found.mean():.3f} to {found.max():.3f}")
            if other:
                facts("as if other items", float(np.concatenate(other).mean()))
                assert np.concatenate(other).mean() > 2 * MEAN
            assert found.mean() < MEAN
            assert found.max() < LARGEST
