"""Every family of models in one process against transformers: logits, log-probs of packed samples, gradients, names."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from relaxd.weights.buckets import TensorBucket, TensorSpec
from services.rollout.engines.transformers.transformers_process import check_manifest, named_parameters
from services.trainer.batch.micro_batch import TrainSequence, pack
from services.trainer.learner.learner import Learner
from services.trainer.model.architectures import FAMILIES
from tests.integration.trainer.trainer_worlds import KINDS, Job, full_logits, make_learner, make_model, make_samples

DECAYS = {"A_log": 1e-3, "dt_bias": 1e-3, "in_proj_a.weight": 1e-4}
"""Tolerances of gradients by ends of names: of the decays of gated delta nets, which transformers computes in float32
whatever the model's dtype is."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda kind: root / kind if (root / kind).exists() else make_model(root / kind, kind)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> Path:
    return models(request.param)


@pytest.fixture
def learner(folder: Path, alone: None) -> Learner:
    return make_learner(Job(folder, algorithm={"old_logprobs": "current"}))


def logprobs(model: torch.nn.Module, sample: TrainSequence) -> torch.Tensor:
    """Log-probs of a sample's tokens but the first, by transformers."""
    logits = model(torch.from_numpy(sample.tokens)[None]).logits[0] / sample.temperature
    return logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(sample.tokens)[1:, None])[:, 0]


def test_every_family_is_tested() -> None:
    """Those with a vision tower in test_images.py."""
    assert {model_type for model_type, _ in KINDS.values()} == {
        name for name, family in FAMILIES.items() if family.prefix == "model."
    }


def test_logits_equal_those_of_transformers(folder: Path, learner: Learner) -> None:
    samples = make_samples()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([reference(torch.from_numpy(sample.tokens)[None]).logits[0] for sample in samples])
    found = full_logits(learner, pack(samples, share_prompts=False))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_log_probs_and_gradients_equal_those_of_transformers(folder: Path, learner: Learner) -> None:
    """With shared prompts, and the reference in float64."""
    samples = make_samples(6, temperature=0.8)
    batch = pack(samples)
    # transformers' grouped products don't know float64.
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)
    exact = [logprobs(reference, sample) for sample in samples]
    trained = [torch.from_numpy(sample.loss_mask)[1:].bool() for sample in samples]
    found = learner.log_probs([batch])[0][batch.loss_mask == 1]
    expected = torch.cat([x[mask] for x, mask in zip(exact, trained, strict=True)])
    np.testing.assert_allclose(found, expected.detach(), atol=1e-5)

    # The gradient of PPO's objective where the ratio is 1.
    advantages = torch.cat(
        [torch.from_numpy(s.columns["advantages"])[1:][mask] for s, mask in zip(samples, trained, strict=True)]
    )
    (-(expected * advantages).sum()).backward()
    learner.accumulate([batch])
    for parameter in learner._policy.parameters():
        parameter.data.copy_(parameter.main_grad)  # to gather gradients under Hugging Face's names
    for parameter in reference.parameters():
        parameter.data = parameter.grad
    ours, theirs = dict(learner.iter_hf_tensors()), named_parameters(reference)
    assert len(ours) > 10
    for name, gradient in ours.items():
        rounding = next((one for end, one in DECAYS.items() if name.endswith(end)), 1e-5)
        assert (gradient - theirs[name]).norm() <= rounding * theirs[name].norm(), name


def test_the_engine_accepts_every_weight_under_its_name(folder: Path, learner: Learner) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    specs = [TensorSpec(spec.name, spec.dtype, spec.shape) for spec in learner.hf_tensor_specs()]
    check_manifest(model, [TensorBucket(tuple(specs), source_rank=0)])
    weights = named_parameters(model)
    for name, tensor in learner.iter_hf_tensors():
        assert torch.equal(tensor, weights[name]), name
