"""The learner in one process: independent of the cut, exact, repeatable, refusing what can't be."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.trainer.batch.micro_batch import PackedMicroBatch, TrainSequence, empty_micro_batch, pack
from services.trainer.learner.learner import Learner
from services.trainer.model.architecture import ModelError, ModelFileError
from tests.integration.trainer.trainer_worlds import (
    COLUMNS,
    Job,
    full_logits,
    log_probs_of,
    make_learner,
    make_model,
    make_samples,
    micro_batches,
    run_world,
)
from tests.kit.megatron_world import shut_down

MakeLearner = Callable[..., Learner]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", tied=True)


@pytest.fixture
def learner(model: Path) -> Iterator[MakeLearner]:
    def make(folder: Path = model, **changes: Any) -> Learner:
        shut_down()
        return make_learner(Job(folder, **changes))

    yield make
    shut_down()


def cut(samples: list[TrainSequence], pieces: int) -> list[PackedMicroBatch]:
    return [pack([samples[i] for i in part]) for part in np.array_split(np.arange(len(samples)), pieces)]


def gradients(learner: Learner) -> torch.Tensor:
    """The accumulated gradients, flat."""
    return torch.cat([p.main_grad.flatten() for p in learner._model.parameters()]).double().clone()


def gloo_threads() -> int:
    """Threads of this process's gloo groups."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def test_worlds_that_were_left_leave_no_threads(learner: MakeLearner) -> None:
    before, left = gloo_threads(), []
    for _ in range(2):
        learner()
        inside = gloo_threads()
        shut_down()
        left.append(gloo_threads())
    # Megatron keeps two groups until it makes others; `before` are those of other tests of this process.
    assert left[0] == left[1] <= before + inside / 10


def test_gradients_do_not_depend_on_the_cut(learner: MakeLearner) -> None:
    samples = make_samples(28)
    made = learner(algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})
    found = {}
    said: list[str] = []
    made.report_to(said.append)
    for pieces in (1, 2, 7):
        said.clear()
        made.accumulate(cut(samples, pieces))
        # Those of the reference's pass, and then those that are trained.
        assert said == 2 * [f"micro-batch {number} of {pieces}" for number in range(1, pieces + 1) if pieces > 1]
        found[pieces] = gradients(made)
        made._model.zero_grad_buffer()
    for pieces in (2, 7):
        assert (found[pieces] - found[1]).norm() / found[1].norm() <= 1e-6
    # And not on the order of a stream, nor on empty micro-batches in it.
    for batch in [*reversed(cut(samples, 7)), empty_micro_batch(COLUMNS)]:
        made.accumulate([batch])
    assert (gradients(made) - found[1]).norm() / found[1].norm() <= 1e-6


def test_a_shared_prompt_is_computed_once_with_the_same_result(learner: MakeLearner) -> None:
    samples = make_samples(9)
    shared, apart = pack(samples), pack(samples, share_prompts=False)
    assert len(shared.tokens) == len(apart.tokens) - 2 * sum(samples[i].prompt_length for i in (0, 3, 6))
    made = learner()
    np.testing.assert_allclose(
        made.log_probs([shared])[0][shared.loss_mask == 1],
        made.log_probs([apart])[0][apart.loss_mask == 1],
        atol=2e-5,
    )
    made.accumulate([shared])
    ours = gradients(made)
    made.discard()
    made.accumulate([apart])
    assert (gradients(made) - ours).norm() / ours.norm() <= 1e-6


def test_log_probs_of_the_reference_that_groups_have_are_used(learner: MakeLearner) -> None:
    made = learner(algorithm={"kl_coef": 0.1, "kl_estimator": "k2"})
    batch = pack(make_samples(6))
    (initial,) = made.log_probs([batch])  # those of the reference, too
    made.accumulate([batch])
    assert made.finish(10.0).metrics["kl"] == pytest.approx(0, abs=1e-9)
    made = learner(algorithm={"kl_coef": 0.1, "kl_estimator": "k2"})
    made.accumulate([replace(batch, columns={**batch.columns, "ref_logprobs": initial - 0.5})])
    assert made.finish(10.0).metrics["kl"] == pytest.approx(0.125, rel=1e-4)


def test_packed_log_probs_equal_unpacked_ones_and_transformers(learner: MakeLearner, model: Path) -> None:
    samples = [*make_samples(9), *make_samples(1, seed=5)]
    long = TrainSequence.from_response(
        np.arange(60),
        np.arange(40),
        loss_mask=np.ones(40, np.uint8),
        columns=dict.fromkeys(COLUMNS, np.zeros(40, np.float32)),
        weight=np.zeros(40, np.float32),
    )
    samples.insert(2, long)  # so that attention needs several blocks
    made = learner()
    (packed,) = made.log_probs([pack(samples, share_prompts=False)])
    apart = np.concatenate(made.log_probs([pack([sample]) for sample in samples]))
    np.testing.assert_allclose(packed, apart, atol=2e-5)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    expected = []
    for sample in samples:
        with torch.no_grad():
            logits = reference(torch.from_numpy(sample.tokens)[None]).logits[0] / sample.temperature
        exact = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(sample.tokens)[1:, None])[:, 0].numpy()
        expected.append(np.concatenate([[0.0], exact]) * sample.loss_mask)
    np.testing.assert_allclose(packed, np.concatenate(expected), atol=1e-4)


def test_log_prob_difference_counts_compared_tokens_only(learner: MakeLearner) -> None:
    samples = make_samples(4)
    made = learner()
    batch = pack(samples)
    batch = replace(
        batch, logprobs_comparable=batch.logprobs_comparable * (np.arange(len(batch.tokens)) % 2).astype(np.uint8)
    )
    assert 0 < batch.logprobs_comparable.sum() < batch.loss_mask.sum()
    exact = made.log_probs([batch])[0]
    off = exact + np.where(batch.logprobs_comparable, np.float32(0.25), np.float32(9)).astype(np.float32)
    samples_apart = replace(batch, columns={**batch.columns, "rollout_logprobs": off})
    made.accumulate([samples_apart])
    stats = made.finish(1.0)
    assert stats.metrics["logprob_difference"] == pytest.approx(0.25, abs=1e-5)
    assert stats.metrics["logprob_difference_max"] == pytest.approx(0.25, abs=1e-5)
    assert stats.metrics["logprob_difference_p99"] == pytest.approx(0.25, rel=0.03)
    assert stats.metrics["logprob_difference_kl"] == pytest.approx(math.exp(-0.25) - 1 + 0.25, rel=1e-4)
    assert stats.metrics["policy_drift_max"] == pytest.approx(9, abs=1e-5)
    assert stats.tokens == int(batch.loss_mask.sum())
    made.accumulate([replace(batch, logprobs_comparable=np.zeros_like(batch.logprobs_comparable))])
    assert "logprob_difference" not in made.finish(1.0).metrics


def test_the_correction_weighs_the_gradient_by_the_ratio_to_the_engine(learner: MakeLearner) -> None:
    """Where the engine was off by one factor everywhere, the gradient is that of an exact engine times the weight."""
    norms = {}
    exact = learner().log_probs([pack(make_samples(4))])[0]
    for name, factor, algorithm in (
        ("none", 1.5, {}),
        ("tis", 1.5, {"correction": "tis"}),
        ("truncated", 3.0, {"correction": "tis", "tis_clip": 1.25}),
        ("icepop", 1.5, {"correction": "icepop"}),
        ("left out", 3.0, {"correction": "icepop", "icepop_high": 2.5}),
    ):
        made = learner(algorithm={"old_logprobs": "current", **algorithm})
        batch = pack(make_samples(4))
        off = {"rollout_logprobs": exact - np.float32(math.log(factor))}
        made.accumulate([replace(batch, columns={**batch.columns, **off})])
        stats = made.finish(1.0)
        norms[name] = stats.grad_norm
        expected = {"tis": (1.5, 0), "truncated": (1.25, 1), "icepop": (1.5, 0), "left out": (0, 1)}.get(name)
        if expected:
            found = stats.metrics["correction_weight"], stats.metrics["correction_fraction"]
            assert found == pytest.approx(expected, rel=1e-4), name
    expected_norms = {"none": 1.0, "tis": 1.5, "truncated": 1.25, "icepop": 1.5, "left out": 0.0}
    for name, expected_norm in expected_norms.items():
        assert norms[name] == pytest.approx(norms["none"] * expected_norm, rel=1e-3, abs=1e-7), name


def test_the_reference_stays_the_initial_model(learner: MakeLearner) -> None:
    made = learner(algorithm={"kl_coef": 0.5})
    batches = cut(make_samples(), 2)
    made.accumulate(batches)
    assert made.finish(10.0).metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    made.accumulate(batches)
    assert made.finish(10.0).metrics["kl"] > 1e-4


def test_the_reference_may_be_another_model(learner: MakeLearner, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    trained = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        trained.get_input_embeddings().weight.mul_(1.1)
    trained.save_pretrained(other)
    batch = pack(make_samples(6))
    larger = make_model(tmp_path / "larger", "llama", num_hidden_layers=3)  # of another architecture, too
    for folder in (other, larger):
        (expected,) = learner(folder).log_probs([batch])
        made = learner(algorithm={"kl_coef": 0.5, "kl_estimator": "k2"}, frozen={"reference": {"": folder}})
        np.testing.assert_allclose(made.frozen_columns([batch])[0]["ref_logprobs"], expected, atol=1e-5)
        assert np.abs(made.log_probs([batch])[0] - expected).max() > 0.01


@pytest.mark.slow
def test_replay_in_fresh_processes_gives_identical_weights(model: Path, tmp_path: Path) -> None:
    jobs = [Job(model, steps=3, pieces=3, algorithm={"kl_coef": 0.1})]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first, second = (run_world(jobs, 1, folder)[0][0] for folder in folders)
    assert first["trajectory"] == second["trajectory"]
    for name, tensor in first["tensors"].items():
        assert np.array_equal(tensor, second["tensors"][name]), name


def test_discarded_gradients_leave_no_trace(learner: MakeLearner) -> None:
    batches = cut(make_samples(), 2)
    made = learner()
    made.accumulate(batches)
    expected = made.finish(10.0)
    made = learner()
    made.accumulate(batches[:1])
    made.discard()
    made.accumulate(batches)
    assert made.finish(10.0) == expected


def test_a_step_without_a_trained_token_changes_nothing_but_decay(learner: MakeLearner) -> None:
    made = learner()
    made.accumulate([empty_micro_batch(COLUMNS)])
    stats = made.finish(1.0)
    assert (stats.loss, stats.grad_norm, stats.tokens) == (0.0, 0.0, 0)
    with pytest.raises(ValueError, match="normalizer is 0: it must be positive"):
        made.finish(0)


def test_bfloat16_trains_with_float32_main_weights(learner: MakeLearner, tmp_path: Path) -> None:
    made = learner(parallel={"dtype": "bfloat16"})
    batches = cut(make_samples(), 2)
    losses = []
    for _ in range(3):
        made.accumulate(batches)
        losses.append(made.finish(30.0).loss)
    assert losses[2] < losses[0]
    made.save_hf(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_float32_head_rounds_no_logit(learner: MakeLearner) -> None:
    """Against float64 from the model's own hidden states; embeddings are tied. Gradients are almost the same."""
    batch, norms = pack(make_samples(), share_prompts=False), []
    for head in (False, True):
        made = learner(parallel={"dtype": "bfloat16", "fp32_lm_head": head})
        (ours,) = made.log_probs([batch])
        error = np.abs(ours - log_probs_of(full_logits(made, batch), batch)).max()
        assert (error < 1e-5) if head else (error > 1e-3)
        made.accumulate([batch])
        norms.append(float(gradients(made).norm()))
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_large_models_are_saved_and_loaded_in_several_files(
    learner: MakeLearner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.model.hf_weights.MAX_FILE_BYTES", 100_000)
    (model / "tokenizer.json").write_text("{}")
    learner().save_hf(tmp_path / "cut")
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert (tmp_path / "cut" / "tokenizer.json").exists()
    learner(tmp_path / "cut").save_hf(tmp_path / "again")
    original = load_file(model / "model.safetensors")
    again = {n: t for file in (tmp_path / "again").glob("*.safetensors") for n, t in load_file(file).items()}
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], original[name]) for name in original)


def test_folders_and_divisions_that_do_not_fit_are_refused(learner: MakeLearner, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"trainer.tensor_parallel is 3: it must divide the model's 4 query heads"):
        make_learner(Job(model, {"tensor_parallel": 3}), ranks=3)
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 1, but trainer.ranks is 2"):
        make_learner(Job(model), ranks=2)
    tensors = load_file(model / "model.safetensors")
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ModelFileError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        learner(tmp_path)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no tensor model.norm.weight"):
        learner(tmp_path)
    save_file({**tensors, "model.norm.weight": norm[:10].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.norm.weight is \[10\], but config.json makes it \[64\]"):
        learner(tmp_path)
    tensors |= {"model.norm.weight": norm, "lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true, but the weights have an lm_head.weight other"):
        learner(tmp_path)


def test_the_demos_batch_fits_the_budget() -> None:
    ones = np.ones(8, np.float32)
    columns = dict.fromkeys(COLUMNS, ones)
    one = TrainSequence.from_response(
        np.arange(30), np.arange(8), loss_mask=np.ones(8, np.uint8), columns=columns, weight=ones
    )
    (share,) = micro_batches([one] * 32, 4096)
    assert len(share) == 1
