"""Qwen3.5, dense and with experts, with images and video: packed rows and answers against transformers' own pass."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from relaxd.data.vision import read_vision
from relaxd.models.layouts import model_parameters
from relaxd.models.shape import read_shape
from services.trainer.batch.micro_batch import TrainSequence, pack
from tests.integration.trainer.learner.image_worlds import make_hybrid_model, make_samples
from tests.integration.trainer.learner.media_layouts import check_layouts
from tests.integration.trainer.trainer_worlds import Job, make_learner
from tests.kit.megatron_world import leave_layout
from tests.kit.vision import (
    Item,
    clip,
    image_logprobs,
    picture,
    prompt_with_media,
    seen_by_transformers,
    without_media,
)
from tests.unit.rollout.engine_harness import Harness

PROMPTS: tuple[tuple[tuple[int, ...], ...], ...] = (((64, 64),), (), ((100, 60), (40, 200)), ((64, 96, 5), (64, 64)))
"""Width and height of each prompt's pictures, with a number of frames that of a clip."""


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make_hybrid_model(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def items(prompt: int) -> list[Item]:
    """The items of a prompt, as `make_samples` makes them."""
    return [
        picture(size[0], size[1], prompt) if len(size) == 2 else clip(size[2], size[0], size[1], prompt)
        for size in PROMPTS[prompt]
    ]


def samples_of(folder: Path) -> list[TrainSequence]:
    """Two of each prompt, whose answers have no tokens of media, after which transformers can't go on."""
    found: list[TrainSequence] = make_samples(read_vision(folder), PROMPTS)
    for sample in found:
        answer = sample.tokens[sample.prompt_length :]
        answer[answer > 250] = 7
    return found


def logprobs_of(model: PreTrainedModel, sample: TrainSequence, prompt: int) -> torch.Tensor:
    ids, config = torch.from_numpy(sample.tokens)[None], model.config
    kinds = (ids == config.image_token_id).long() + 2 * (ids == config.video_token_id).long()
    logits = model(ids, mm_token_type_ids=kinds, **seen_by_transformers(items(prompt))).logits[0]
    logprobs: torch.Tensor = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[torch.from_numpy(sample.loss_mask)[1:] == 1]


def test_log_probs_and_gradients_equal_those_of_transformers(
    folder: Path, reference: PreTrainedModel, alone: None
) -> None:
    samples, expected, loss = samples_of(folder), [], torch.zeros(())
    for number, sample in enumerate(samples):
        own = logprobs_of(reference, sample, number // 2)
        expected.append(own.detach().numpy())
        loss = loss - (own * torch.from_numpy(sample.columns["advantages"][sample.loss_mask == 1])).sum()
    loss.backward()
    learner = make_learner(Job(folder, {"freeze": []}, {"old_logprobs": "current"}))
    batch = pack(samples)
    assert (batch.prefixes[:, 1] > 0).sum() == len(PROMPTS)
    (found,) = learner.log_probs([batch])
    np.testing.assert_allclose(found[batch.loss_mask == 1], np.concatenate(expected), atol=1e-5)
    learner.accumulate([batch])
    for parameter in learner._policy.parameters():
        parameter.data.copy_(parameter.main_grad)
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in learner.iter_hf_tensors():
        rounding = 1e-3 if name.endswith(("A_log", "dt_bias")) else 1e-4
        assert (gradient - theirs.pop(name)).norm() <= rounding * gradient.norm(), name
    assert theirs == {}
    leave_layout()


@pytest.mark.night  # every layout
def test_two_ranks_train_as_one_does(folder: Path, tmp_path: Path, alone: None) -> None:
    names = ("TP2", "PP2", "DP2", "TP2 recomputed", *(["EP2"] if read_shape(folder).experts else []))
    check_layouts({folder: names}, tmp_path / "world")


@pytest.fixture
def engine(folder: Path) -> Iterator[Harness]:
    harness = Harness(folder)
    yield harness
    harness.engine.stop()


def test_the_engine_sees_as_transformers_does(folder: Path, reference: PreTrainedModel, engine: Harness) -> None:
    vision = read_vision(folder)
    for number in range(len(PROMPTS)):
        prompt, media = prompt_with_media(vision, items(number))
        engine.submit(str(number), prompt, 2, media=media, max_new_tokens=12 - number, seed=number, ignore_eos=True)
    for number in range(len(PROMPTS)):
        prompt, _ = prompt_with_media(vision, items(number))
        for answer in engine.wait(str(number), 2):
            tokens = without_media(answer.tokens, vision)
            full = image_logprobs(reference, prompt, tokens, items(number))
            np.testing.assert_allclose(answer.logprobs[: len(tokens)], full.float(), atol=1e-5)


def test_its_parameters_are_counted(folder: Path, reference: PreTrainedModel) -> None:
    assert model_parameters(read_shape(folder)) == sum(parameter.numel() for parameter in reference.parameters())
