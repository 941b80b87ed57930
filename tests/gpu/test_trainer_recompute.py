"""On a GPU in bf16: what recompute saves, that it changes no gradient, and that kernels are exchangeable."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.batch.micro_batch import PackedMicroBatch, TrainSequence, pack
from services.trainer.learner.learner import Learner
from services.trainer.transformer.attention_kernels import attention_kernel
from tests.integration.trainer.trainer_worlds import VOCAB, Job, make_learner, make_model
from tests.kit.megatron_world import shut_down

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MakeLearner = Callable[..., Learner]
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {**SIZES, "num_key_value_heads": 4, "initializer_range": 0.02}
    return {kind: make_model(root / kind, kind, **sizes) for kind in ("qwen3", "qwen3_moe")}


@pytest.fixture
def learner() -> Iterator[MakeLearner]:
    def make(folder: Path, **settings: Any) -> Learner:
        shut_down()
        return make_learner(Job(folder, {"dtype": "bfloat16", **settings}, {"old_logprobs": "current"}))

    yield make
    shut_down()


def make_batch() -> PackedMicroBatch:
    """8,000 tokens: groups of samples that share a prompt, of lengths from 3 to 1,500."""
    rng = np.random.default_rng(0)
    samples = []
    for prompt_length, lengths in ((200, [1500, 700, 30, 900]), (37, [3, 1, 400]), (600, [1200, 1000, 1400])):
        prompt = rng.integers(0, VOCAB, prompt_length)
        for length in lengths:
            ones = np.ones(length, np.float32)
            columns = {"rollout_logprobs": -6 * ones, "advantages": rng.normal(0, 1, length).astype(np.float32)}
            mask = np.ones(length, np.uint8)
            response = rng.integers(0, VOCAB, length)
            samples.append(TrainSequence.from_response(prompt, response, loss_mask=mask, columns=columns, weight=ones))
    return pack(samples)


def gradients(learner: Learner) -> tuple[Tensor, int]:
    """Gradients of the batch, and the bytes that computing them took on top of what was there."""
    batch = make_batch()
    learner.accumulate([batch])  # compiles
    learner.discard()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    learner.accumulate([batch])
    torch.cuda.synchronize()
    found = torch.cat([parameter.main_grad.flatten() for parameter in learner._model.parameters()]).clone()
    return found, torch.cuda.max_memory_allocated() - before


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_recompute_saves_memory_and_changes_no_gradient(
    learner: MakeLearner, models: dict[str, Path], kind: str, facts: Callable[[str, object], None]
) -> None:
    expected, everything = gradients(learner(models[kind]))
    # Attention's backward pass adds up in any order: a run differs from the next one as much as this.
    again, _ = gradients(learner(models[kind]))
    noise = max(2 * relative(again, expected), 1e-3)
    for recompute, share in (("selective", 0.7), ("full", 0.55)):
        found, bytes_taken = gradients(learner(models[kind], recompute=recompute))
        facts(f"{recompute}_memory_share", bytes_taken / everything)
        assert relative(found, expected) < noise
        assert bytes_taken < share * everything


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_on_the_host_change_no_gradient_and_save_memory(
    learner: MakeLearner, models: dict[str, Path], recompute: str, facts: Callable[[str, object], None]
) -> None:
    expected, without = gradients(learner(models["qwen3"], recompute=recompute))
    again, _ = gradients(learner(models["qwen3"], recompute=recompute))
    made = learner(models["qwen3"], recompute=recompute, activation_offload_bytes=4 << 30)
    found, bytes_taken = gradients(made)
    facts(f"{recompute}_memory_share", bytes_taken / without)
    assert relative(found, expected) <= max(2 * relative(again, expected), 1e-3)
    assert made._forward._offload is not None
    assert made._forward._offload.moved_bytes > 0
    assert bytes_taken < without * 1.05


def test_attention_from_slices_is_right() -> None:
    for window in (None, 100):
        assert attention_kernel(torch.device("cuda"), torch.bfloat16, 128, "auto", window, sliced=True) == "varlen"


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_attention_kernels_give_the_same_gradients(
    learner: MakeLearner, models: dict[str, Path], kind: str, facts: Callable[[str, object], None]
) -> None:
    expected, _ = gradients(learner(models[kind], attention="varlen"))
    made = learner(models[kind])
    if made._forward._to_device.keywords["kernel"] != "cudnn":
        pytest.skip("cuDNN's attention doesn't work here")
    found, _ = gradients(made)
    facts("difference", relative(found, expected))
    # With experts, rounding sends some tokens to another one.
    assert relative(found, expected) < (0.02 if kind == "qwen3" else 0.1)


def test_experts_come_back_from_where_they_were_sent(learner: MakeLearner, models: dict[str, Path]) -> None:
    made = learner(models["qwen3_moe"])
    mlp = made._policy.decoder.layers[0].mlp
    x = torch.randn(3000, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    found = []
    for send in (False, True):
        tokens = x.clone().requires_grad_()
        routing = mlp.router(tokens)
        if send:  # to this rank itself, over NCCL
            output = mlp.experts._forward_expert_parallel(tokens, routing.experts, routing.weights, False)
        else:
            output = mlp.experts(tokens, routing)
        output.backward(grad)
        found.append((output.detach().float(), tokens.grad.float(), mlp.experts.linear_fc1.main_grad.clone()))
        made.discard()
    for ours, theirs in zip(*found, strict=True):
        assert relative(ours, theirs) < 5e-3
