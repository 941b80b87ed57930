"""Weights of models with towers: from Hugging Face's files to the trainer, and back to files and to the engine."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relaxd.weights.buckets import TensorBucket, TensorSpec
from services.rollout.engines.transformers.transformers_process import check_manifest, named_parameters
from services.rollout.engines.transformers.vision import load_model
from tests.integration.trainer.learner.image_worlds import make_hybrid_model
from tests.integration.trainer.trainer_worlds import Job, make_learner
from tests.kit.megatron_world import leave_layout
from tests.kit.sounds import make_omni_model
from tests.kit.vision import EXPERTS, make_vision_model, with_published_experts


def make_mixture(folder: Path) -> Path:
    return make_vision_model(folder, tied=False, model_type="qwen3_vl_moe", **EXPERTS)


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "qwen3_vl, tied": make_vision_model,
    "qwen3_vl": lambda folder: make_vision_model(folder, tied=False),
    "qwen3_vl_moe": lambda folder: with_published_experts(make_mixture(folder)),
    "qwen3_vl_moe, as transformers writes it": make_mixture,
    "qwen3_5": lambda folder: make_hybrid_model(folder, "qwen3_5"),
    "qwen3_5_moe": lambda folder: make_hybrid_model(folder, "qwen3_5_moe"),
    "qwen3_omni_moe": make_omni_model,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_changes_no_bit(name: str, alone: None, tmp_path: Path) -> None:
    """Of any weight, towers included: in the saved file, in what engines get, and where transformers reads it again."""
    folder = MODELS[name](tmp_path / "model")
    engine, _ = load_model(folder, torch.float32)
    learner = make_learner(Job(folder, {"freeze": []}, {"old_logprobs": "current"}))
    learner.save_hf(tmp_path / "saved")
    specs = [TensorSpec(spec.name, spec.dtype, spec.shape) for spec in learner.hf_tensor_specs()]
    sent = dict(learner.iter_hf_tensors())
    leave_layout()

    published = with_published_experts(folder) if name.endswith("writes it") else folder
    expected, saved = load_file(published / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert [spec.name for spec in specs] == list(sent)
    assert saved.keys() == sent.keys() == expected.keys()
    for tensor, value in expected.items():
        assert saved[tensor].dtype == value.dtype
        assert torch.equal(saved[tensor], value), tensor
        assert torch.equal(sent[tensor], value), tensor

    check_manifest(engine, [TensorBucket(tuple(specs), source_rank=0)])
    served = named_parameters(engine)
    assert served.keys() >= expected.keys()
    again = dict(load_model(tmp_path / "saved", torch.float32)[0].named_parameters())
    for parameter, value in engine.named_parameters():
        assert torch.equal(again.pop(parameter), value), parameter
    assert not again
    for tensor, value in expected.items():
        assert torch.equal(served[tensor], value), tensor
