"""Gated delta nets over many chunks: packed sequences against transformers, engine against trainer, refusals."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file as load_weights
from safetensors.torch import save_file

from relaxd.cli.preparing.config_command import check
from relaxd.config.load_toml import load_file
from relaxd.models.layouts import Layout, problem
from relaxd.models.shape import read_shape
from services.rollout.engines.request_types import Version
from services.rollout.engines.transformers.transformers_process import named_parameters
from services.trainer.batch.micro_batch import TrainSequence, pack
from services.trainer.learner.learner import Learner
from services.trainer.model.architecture import ModelError
from services.trainer.model.architectures import read_architecture
from tests.integration.trainer.trainer_worlds import VOCAB, Job, make_learner, make_model
from tests.kit.megatron_world import leave_layout
from tests.unit.rollout.engine_harness import Harness

KIND = "qwen3_5_text"
EXAMPLE = Path(__file__).parents[4] / "examples" / "addition.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hybrid") / KIND, KIND)


@pytest.fixture
def learner(folder: Path, alone: None) -> Learner:
    return made(folder)


def made(folder: Path, **settings: Any) -> Learner:
    """A learner in place of the one before."""
    leave_layout()
    found: Learner = make_learner(Job(folder, settings, algorithm={"old_logprobs": "current"}))
    return found


def sample(prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0) -> TrainSequence:
    random, ones = np.random.default_rng(len(response)), np.ones(len(response), np.float32)
    advantages = random.normal(0, 1, len(response)).astype(np.float32)
    return TrainSequence.from_response(
        prompt,
        response,
        loss_mask=np.ones(len(response), np.uint8),
        columns={"rollout_logprobs": -5 * ones, "advantages": advantages},
        weight=ones,
        temperature=temperature,
    )


def long_samples() -> list[TrainSequence]:
    """Three of one long prompt, two of another, and two of short ones."""
    random = np.random.default_rng(5)
    sizes = ((150, (40, 70, 3)), (64, (65, 9)), (3, (5,)), (1, (130,)))
    prompts = [(random.integers(0, VOCAB, length), responses) for length, responses in sizes]
    return [
        sample(prompt, random.integers(0, VOCAB, length), temperature=0.9)
        for prompt, responses in prompts
        for length in responses
    ]


def gradients(learner: Learner, samples: list[TrainSequence]) -> dict[str, torch.Tensor]:
    """Gradients by Hugging Face's names, of PPO's objective where the ratio is 1."""
    learner.accumulate([pack(samples)])
    for parameter in learner._policy.parameters():
        parameter.data.copy_(parameter.main_grad)
    return {name: tensor.clone() for name, tensor in learner.iter_hf_tensors()}


def test_packed_samples_of_many_chunks_equal_transformers(folder: Path, learner: Learner) -> None:
    samples, reference = long_samples(), transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, loss = [], torch.zeros(())
    for one in samples:
        tokens = torch.from_numpy(one.tokens)
        logprobs = (reference(tokens[None]).logits[0] / one.temperature).log_softmax(-1)
        own = logprobs[:-1].gather(-1, tokens[1:, None])[one.prompt_length - 1 :, 0]
        expected.append(own.detach())
        loss = loss - (own * torch.from_numpy(one.columns["advantages"][one.prompt_length :])).sum()
    loss.backward()
    batch = pack(samples)
    assert (batch.prefixes[:, 1] > 0).sum() == 3
    found = learner.log_probs([batch])[0][batch.loss_mask == 1]
    np.testing.assert_allclose(found, torch.cat(expected), atol=1e-5)
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in gradients(learner, samples).items():
        rounding = 1e-3 if name.endswith(("A_log", "dt_bias")) else 1e-4
        assert (gradient - theirs[name]).norm() <= rounding * theirs[name].norm(), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_gradient(folder: Path, learner: Learner, recompute: str) -> None:
    samples = long_samples()
    expected = gradients(learner, samples)
    for name, gradient in gradients(made(folder, recompute=recompute), samples).items():
        assert torch.equal(gradient, expected[name]), name


def test_bfloat16_is_near_float32(folder: Path, learner: Learner) -> None:
    batch = pack(long_samples())
    (exact,) = learner.log_probs([batch])
    rounded = made(folder, dtype="bfloat16")
    (found,) = rounded.log_probs([batch])
    assert float(np.abs(found - exact).mean()) < 0.05
    rounded.accumulate([batch])
    assert rounded.finish(float(batch.loss_mask.sum())).grad_norm > 0


@pytest.fixture
def engine(folder: Path) -> Iterator[Harness]:
    harness = Harness(folder)
    yield harness
    harness.engine.stop()


def test_the_engine_has_the_trainers_log_probs_before_and_after_a_step(
    folder: Path, learner: Learner, engine: Harness
) -> None:
    """Prompts of several lengths are in one batch, which others join, and which shrinks."""
    random = np.random.default_rng(2)
    prompts = [random.integers(3, VOCAB, length) for length in (100, 7, 64)]

    def gap(step: int) -> float:
        for number, prompt in enumerate(prompts):
            engine.submit(f"{step}-{number}", prompt.tolist(), 2, max_new_tokens=70 - 20 * number, ignore_eos=True)
            engine.wait_for_tokens(f"{step}-{number}", 3)
        samples, heard = [], []
        for number, prompt in enumerate(prompts):
            for answer in engine.wait(f"{step}-{number}", 2):
                samples.append(sample(prompt, np.array(answer.tokens)))
                heard += answer.logprobs
        batch = pack(samples)
        (found,) = learner.log_probs([batch])
        learner.accumulate([batch])
        learner.finish(float(batch.loss_mask.sum()))
        return float(np.abs(found[batch.loss_mask == 1] - np.array(heard)).max())

    assert gap(0) <= 1e-5
    engine.engine.pause("in_place", 60, 20)
    with engine.engine.update(Version(1, 1)):
        engine.engine.gate.touch()
        served = named_parameters(engine.model)
        for name, tensor in learner.iter_hf_tensors():
            served.pop(name).copy_(tensor)
    assert served == {}
    engine.engine.gate.confirm(Version(1, 1))
    engine.engine.gate.resume()
    assert gap(1) <= 1e-5


def test_heads_for_further_tokens_are_left_out(folder: Path, tmp_path: Path, alone: None) -> None:
    other = tmp_path / "with-mtp"
    other.mkdir()
    weights = load_weights(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(4, 4)}, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_text((folder / "config.json").read_text())
    made(other).save_hf(tmp_path / "written")
    written = load_weights(tmp_path / "written" / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        (Layout(2, context=2), "trainer.context_parallel is 2: it must be 1, because gated delta nets (qwen3_5_text)"),
        (Layout(4, tensor=4), "trainer.tensor_parallel is 4: it must divide the model's 2 key-value heads"),
    ],
)
def test_layouts_that_cannot_divide_a_state_are_refused(folder: Path, layout: Layout, wrong: str) -> None:
    assert problem(layout, read_shape(folder)).startswith(wrong)


def test_config_check_names_what_such_a_run_cannot_have(folder: Path) -> None:
    settings = [f"--model.path={folder}", "--rollout.engine=sglang", "--trainer.ranks=2"]
    run = load_file(EXAMPLE, [*settings, "--trainer.context_parallel=2"])
    found = {problem.setting: problem.message for problem in check(run, call_reward=False)}
    assert f"isn't known to run models of type '{KIND}'" in found["rollout.engine"]
    assert "gated delta nets" in found["trainer.context_parallel"]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "layer_types is .* at least once"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads is 3: linear_num_key_heads, which is 2, must divide it",
        ),
        ({"attention_bias": True}, "attention_bias is True: only False is supported"),
        (
            {"model_type": "qwen3_5_moe_text", "moe_intermediate_size": 48, "norm_topk_prob": False},
            "norm_topk_prob is False: only True is supported",
        ),
    ],
)
def test_configurations_that_are_not_supported_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], wrong: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=wrong):
        read_architecture(tmp_path)
