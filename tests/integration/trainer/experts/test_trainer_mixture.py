"""Mixture-of-experts models in the learner, in one process: gradients, the routers' own losses, freezing, recompute."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from services.trainer.batch.micro_batch import TrainSequence, pack
from services.trainer.learner.learner import Learner
from tests.integration.trainer.trainer_worlds import Job, make_learner, make_model, make_samples
from tests.kit.megatron_world import shut_down

MakeLearner = Callable[..., Learner]
KINDS = ("qwen2_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in KINDS}


@pytest.fixture
def learner() -> Iterator[MakeLearner]:
    def make(folder: Path, **settings: Any) -> Learner:
        shut_down()
        return make_learner(Job(folder, settings, {"old_logprobs": "current"}))

    yield make
    shut_down()


def gradients(learner: Learner, samples: list[TrainSequence]) -> dict[str, Tensor]:
    learner.accumulate([pack(samples, share_prompts=False)])
    found = {n: p.main_grad.clone() for n, p in learner._policy.named_parameters() if p.requires_grad}
    learner.discard()
    return found


def load_reference(folder: Path) -> Any:
    """transformers' model in float64, which its own grouped products don't know."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


def theirs(folder: Path, samples: list[TrainSequence], balance: float = 0.0, z: float = 0.0) -> dict[str, Tensor]:
    """Gradients of transformers' model in float64, of PPO's objective at ratio 1 and of the routers' losses."""
    reference = load_reference(folder)
    loss = torch.zeros((), dtype=torch.float64)
    routed: list[list[Tensor]] = []
    for sample in samples:
        output = reference(torch.from_numpy(sample.tokens)[None], output_router_logits=True)
        logits = output.logits[0] / sample.temperature
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(sample.tokens)[1:, None])[:, 0]
        loss = loss - (logprobs * torch.from_numpy(sample.columns["advantages"] * sample.loss_mask)[1:].double()).sum()
        routed.append([logits.view(-1, logits.shape[-1]) for logits in output.router_logits])
    weight = float(sum((sample.weight * sample.loss_mask).sum() for sample in samples))
    for layer in zip(*routed, strict=True):
        logits = torch.cat(layer)
        probabilities = logits.softmax(-1)
        chosen = torch.zeros_like(logits).scatter_(1, probabilities.topk(2).indices, 1.0)
        fractions = chosen.mean(0) / 2
        loss = loss + weight * balance * logits.shape[1] * (fractions * probabilities.mean(0)).sum()
        loss = loss + weight * z * logits.logsumexp(-1).square().mean()
    loss.backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters()}


def check(ours: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> None:
    """Of router, experts and what is around them, in both layers."""
    for layer in (0, 1):
        hf, megatron = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
        pairs = {
            "router.weight": expected[f"{hf}.gate.weight"],
            "experts.linear_fc1": expected[f"{hf}.experts.gate_up_proj"],
            "experts.linear_fc2": expected[f"{hf}.experts.down_proj"],
        }
        if kind == "qwen2_moe":
            shared = (expected[f"{hf}.shared_expert.{name}_proj.weight"] for name in ("gate", "up"))
            pairs["shared_expert.linear_fc1.weight"] = torch.cat(tuple(shared))
            pairs["shared_expert_gate.weight"] = expected[f"{hf}.shared_expert_gate.weight"]
        for name, exact in pairs.items():
            found = ours[f"{megatron}.{name}"].double().view(exact.shape)
            assert exact.norm() > 0, name
            assert (found - exact).norm() / exact.norm() < 2e-5, (layer, name)
    if kind == "qwen2_moe":
        biases = [expected[f"model.layers.1.self_attn.{x}_proj.bias"].view(2, -1, 16) for x in "qkv"]
        exact = torch.cat(biases, 1).flatten()
        found = ours["decoder.layers.1.self_attention.linear_qkv.bias"].double()
        assert (found - exact).norm() / exact.norm() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_transformers(learner: MakeLearner, models: dict[str, Path], kind: str) -> None:
    samples = make_samples(6, temperature=0.8)
    check(gradients(learner(models[kind]), samples), theirs(models[kind], samples), kind)


def test_the_routers_losses_have_the_gradient_of_their_formulas(learner: MakeLearner, models: dict[str, Path]) -> None:
    samples = make_samples(6, temperature=0.8)
    expected = theirs(models["qwen3_moe"], samples, balance=0.3, z=0.2)
    made = learner(models["qwen3_moe"], moe={"aux_loss_coef": 0.3, "z_loss_coef": 0.2})
    check(gradients(made, samples), expected, "qwen3_moe")
    made.accumulate([pack(samples, share_prompts=False)])
    metrics = made.finish(10.0).metrics
    assert 1.0 <= metrics["expert_balance_loss"] < 2.0
    assert metrics["expert_z_loss"] > 0
    assert metrics["expert_dropped"] == 0


def test_the_load_is_that_of_transformers_routers(learner: MakeLearner, models: dict[str, Path]) -> None:
    samples = make_samples(6)
    made = learner(models["qwen3_moe"])
    made.log_probs([pack(samples)])  # neither evaluation counts
    made.accumulate([pack(samples[:1])])
    made.discard()  # nor what is given up
    made.accumulate([pack(samples[:3], share_prompts=False)])
    made.accumulate([pack(samples[3:], share_prompts=False)])
    metrics = made.finish(10.0).metrics
    reference = load_reference(models["qwen3_moe"])
    counts = torch.zeros(2, 4)
    for sample in samples:
        with torch.no_grad():
            routed = reference(torch.from_numpy(sample.tokens)[None], output_router_logits=True).router_logits
        for layer, logits in enumerate(routed):
            counts[layer] += logits.view(-1, 4).topk(2).indices.flatten().bincount(minlength=4)
    fullest = counts.amax(1) / counts.mean(1)
    assert metrics["expert_load_max"] == pytest.approx(float(fullest.max()))
    assert metrics["expert_load_mean"] == pytest.approx(float(fullest.mean()))
    assert metrics["expert_load_empty"] == 0


def test_a_frozen_router_stays_and_lets_gradients_pass(
    learner: MakeLearner, models: dict[str, Path], tmp_path: Path
) -> None:
    samples = make_samples(6)
    free = gradients(learner(models["qwen3_moe"]), samples)
    made = learner(models["qwen3_moe"], moe={"freeze_router": True})
    frozen = gradients(made, samples)
    routers = {name for name in free if "router" in name}
    assert len(routers) == 2
    assert frozen.keys() == free.keys() - routers
    for name, tensor in frozen.items():
        torch.testing.assert_close(tensor, free[name])
    before = {name: tensor.clone() for name, tensor in made.iter_hf_tensors()}
    made.accumulate([pack(samples)])
    made.finish(10.0)
    (tmp_path / "checkpoint").mkdir()
    snapshot = made.snapshot(tmp_path / "checkpoint")
    snapshot.write()
    after = {name: tensor.clone() for name, tensor in made.iter_hf_tensors()}
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.endswith("mlp.gate.weight"), name
    made = learner(models["qwen3_moe"], moe={"freeze_router": True})
    made.restore(tmp_path / "checkpoint", 1, same_layout=True)
    assert all(torch.equal(tensor, after[name]) for name, tensor in made.iter_hf_tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_changes_no_bit(learner: MakeLearner, models: dict[str, Path], kind: str) -> None:
    samples = make_samples(9)
    expected = gradients(learner(models[kind]), samples)
    for recompute in (
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_layers": 1},
        {"recompute": "full"},
    ):
        found = gradients(learner(models[kind], **recompute), samples)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), recompute


@pytest.mark.parametrize("kind", KINDS)
def test_kept_weights_are_sent_until_the_step_ends(learner: MakeLearner, models: dict[str, Path], kind: str) -> None:
    made = learner(models[kind])

    def sent() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in made.iter_hf_tensors()}

    for _ in range(2):
        before = sent()
        made.keep_weights()
        for _ in range(2):
            made.accumulate([pack(make_samples(6))])
            made.update(5.0)
            between = sent()
            assert between.keys() == before.keys()
            assert all(torch.equal(between[name], tensor) for name, tensor in before.items())
        made.end_step()
        after = sent()
        assert not any(torch.equal(after[name], tensor) for name, tensor in before.items() if "experts" in name)
