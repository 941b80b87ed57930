"""Passes of the transformers engine's towers while versions of the weights arrive."""

import threading
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3OmniMoeThinkerForConditionalGeneration

from relaxd.data.towers import TowerOutputs
from relaxd.weights.buckets import TensorSpec, pack, plan_buckets
from relaxd.weights.weight_group import Rendezvous, WeightGroup, host_store
from services.rollout.engines.request_types import Version
from services.rollout.engines.transformers.transformers_process import WeightReceiver, named_parameters
from tests.kit.sounds import make_omni_model, omni_logprobs, omni_prompt, sound, without_marks
from tests.kit.vision import Item, SoundClip, clip, picture
from tests.unit.rollout.engine_harness import Answer, Harness

PROMPTS: list[list[Item]] = [
    [picture(100, 60), sound(1.31, 1)],
    [sound(0.43, 2), picture(64, 64, 1), picture(100, 60)],
    [SoundClip(clip(6, 64, 64, 3), sound(1.31, 1))],
]
INPUTS = 6
"""Different inputs of towers in PROMPTS: three pictures or clips and two sounds, and the clip's own sound."""
LANGUAGE, SEES, HEARS = (
    "thinker.model.norm.weight",
    "thinker.visual.patch_embed.proj.bias",
    "thinker.audio_tower.ln_post.bias",
)
STORE, NUMBERS = host_store(), count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_model(tmp_path_factory.mktemp("towers"))


@pytest.fixture
def harness(folder: Path) -> Iterator[Harness]:
    harness = Harness(folder, serve=False)
    yield harness
    harness.engine.stop()


def receive(harness: Harness, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Send a version of all weights through a group of two members."""
    buckets = plan_buckets([TensorSpec(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()], 1 << 20, 0)
    place = Rendezvous(transport="gloo", store_port=STORE.port, name=f"towers-{next(NUMBERS)}", world_size=2)
    source, own = WeightGroup(place, 0), WeightGroup(place, 1)

    def send() -> None:
        source.connect(20)
        for bucket in buckets:
            source.broadcast(pack(bucket, tensors, torch.empty(bucket.nbytes, dtype=torch.uint8)), 0, 20)

    sending = threading.Thread(target=send)
    sending.start()
    own.connect(20)
    harness.engine.pause("in_place", 60, 20)
    WeightReceiver(harness.engine, own, buckets, stage_all=number % 2 == 0).receive(
        Version(1, number), 20, with_checksums=False
    )
    sending.join()
    harness.engine.gate.confirm(Version(1, number))
    harness.engine.gate.resume()
    source.abort()
    own.abort()


def ask(harness: Harness, folder: Path, name: str) -> list[Answer]:
    """Ask all prompts, one after the other, for two samples each."""
    found = []
    for number, items in enumerate(PROMPTS):
        prompt, media = omni_prompt(folder, items)
        harness.submit(f"{name}/{number}", prompt, 2, media=media, max_new_tokens=4, seed=number, ignore_eos=True)
        found += harness.wait(f"{name}/{number}", 2)
    return found


def check(answers: list[Answer], folder: Path, reference: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare answers with transformers under these weights, the first one to each prompt."""
    for name, one in named_parameters(reference).items():
        one.copy_(tensors[name])
    for items, answer in zip(PROMPTS, answers[::2], strict=True):
        tokens = without_marks(answer.tokens, folder)
        full = omni_logprobs(reference, omni_prompt(folder, items)[0], tokens, items)
        np.testing.assert_allclose(answer.logprobs[: len(tokens)], full, atol=1e-5)


def test_towers_run_once_for_each_item_until_their_weights_change(harness: Harness, folder: Path) -> None:
    """In versions that change the language model, one value of a tower, and nothing at all."""
    tensors = {name: one.clone() for name, one in named_parameters(harness.model).items()}
    reference = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    outputs, runs = harness.engine.tower_outputs, []
    for number, changed in enumerate((None, LANGUAGE, SEES, HEARS, LANGUAGE, None)):
        if changed is not None:
            tensors[changed].view(-1)[-1] += 0.5
        receive(harness, number, tensors)
        before = outputs.runs
        answers = ask(harness, folder, str(number))
        runs.append(outputs.runs - before)
        check(answers, folder, reference, tensors)
    assert runs == [INPUTS, 0, INPUTS, INPUTS, 0, 0]


def test_outputs_are_the_same_bit_for_bit_if_none_is_kept(harness: Harness, folder: Path) -> None:
    receive(harness, 0, {name: one.clone() for name, one in named_parameters(harness.model).items()})
    found = [ask(harness, folder, str(number)) for number in range(2)]
    harness.engine.tower_outputs = none_kept = TowerOutputs(0)
    found.append(ask(harness, folder, "none"))
    assert none_kept.runs == 7  # one picture is in two prompts
    for answers in found[1:]:
        for one, other in zip(found[0], answers, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
