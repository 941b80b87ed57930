"""Two gloo processes, divided in every way, against one process and against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from services.trainer.batch.micro_batch import pack
from tests.integration.trainer.trainer_worlds import (
    CP2,
    EP2,
    KINDS,
    LAYOUTS,
    PP2,
    TP2,
    Job,
    make_model,
    make_samples,
    run_job,
    run_named,
)

pytestmark = pytest.mark.slow  # every layout takes minutes

WAYS = LAYOUTS | {"EP2": EP2}

CANDIDATES: dict[str, Any] = {
    "candidates": 6,
    "algorithm": {"distill_loss_coef": 0.5, "distill_top_k": 6, "distill_divergence": "jensen_shannon"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {kind: make_model(root / kind, kind) for kind in KINDS}
    return made | {"llama_tied": make_model(root / "llama_tied", "llama", tied=True)}


@pytest.fixture(scope="module")
def jobs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Job]:
    """(model, way) -> job. Three steps each, a gather beside the first ones, a save at the end of untrained ones."""
    saved = tmp_path_factory.mktemp("saved")
    train = {"steps": 3, "pieces": 2, "gather_beside": True, "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}}
    made = {(model, way): Job(models[model], WAYS[way], **train) for model in ("llama_tied", "qwen3") for way in WAYS}
    made |= {("qwen3_moe", way): Job(models["qwen3_moe"], WAYS[way], **train) for way in ("TP2", "EP2", "DP2", "CP2")}
    made = {key: job for key, job in made.items() if key[1] != "EP2" or key[0] == "qwen3_moe"}
    made |= {("qwen2_moe", way): Job(models["qwen2_moe"], WAYS[way], **train) for way in ("TP2", "EP2", "PP2")}
    made |= {("qwen3_5_text", way): Job(models["qwen3_5_text"], WAYS[way], **train) for way in ("TP2", "PP2", "DP2")}
    made["qwen3_5_text", "TP2 recompute"] = Job(models["qwen3_5_text"], {**TP2, "recompute": "full"}, **train)
    made["llama3", "TP2"] = Job(models["llama3"], TP2, **train)  # biases of a row-parallel layer
    made["qwen3", "CP2 recompute"] = Job(models["qwen3"], {**CP2, "recompute": "full"}, **train)
    for model, way in (("qwen3", "TP2"), ("qwen2_moe", "TP2"), ("qwen3_moe", "EP2")):
        made[model, f"{way} selective"] = Job(models[model], {**WAYS[way], "recompute": "selective"}, **train)
    made["qwen3_moe", "PP2 one layer"] = Job(
        models["qwen3_moe"], {**PP2, "recompute": "full", "recompute_layers": 1}, **train
    )
    for model in ("qwen3", "qwen2_moe"):
        made[model, "PP2 one schedule"] = Job(models[model], PP2, **train, one_schedule=True)
    for way in WAYS:
        if way != "EP2":
            made["qwen3", f"{way} candidates"] = Job(models["qwen3"], WAYS[way], **{**train, **CANDIDATES})
    bf16 = {"dtype": "bfloat16"}
    made["qwen3", "bf16"] = Job(models["qwen3"], bf16, steps=3)
    made["qwen3", "bf16 offloaded"] = Job(models["qwen3"], {**bf16, "optimizer": {"cpu_offload": True}}, steps=3)
    for model in ("llama_tied", "qwen3"):
        for head in (False, True):
            own = {**bf16, **TP2, "fp32_lm_head": head}
            made[model, f"bf16 TP2 head {head}"] = Job(models[model], own, logits=True)
    made["qwen3", "CP2 untrained"] = Job(models["qwen3"], CP2)
    made["qwen2_sliding", "CP2 untrained"] = Job(models["qwen2_sliding"], CP2)
    for model in (*KINDS, "llama_tied"):
        made[model, "TP2 untrained"] = Job(models[model], TP2, logits=True, save=saved / f"{model}-tp")
        made[model, "PP2 untrained"] = Job(models[model], PP2, logits=True, save=saved / f"{model}-pp")
    for model in ("qwen2_moe", "qwen3_moe", "qwen3_moe_bias", "qwen3_next_moe", "qwen3_5_moe_text"):
        made[model, "EP2 untrained"] = Job(models[model], EP2, save=saved / f"{model}-ep")
    return made


@pytest.fixture(scope="module")
def two_ranks(
    jobs: dict[tuple[str, str], Job], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return run_named(jobs, 2, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def one_rank(models: dict[str, Path], jobs: dict[tuple[str, str], Job]) -> dict[str, dict[str, Any]]:
    trained = ("llama_tied", "llama3", "qwen3", "qwen3_5_text", "qwen2_moe", "qwen3_moe")
    algorithm = jobs["qwen3", "TP2"].algorithm
    made = {model: run_job(Job(models[model], steps=3, pieces=3, algorithm=algorithm)) for model in trained}
    return made | {"qwen3 candidates": run_job(Job(models["qwen3"], steps=3, pieces=3, **CANDIDATES))}


def alone(key: tuple[str, str]) -> str:
    """The name in `one_rank` of what a world has done."""
    return f"{key[0]} candidates" if "candidates" in key[1] else key[0]


@pytest.mark.parametrize("model", ["qwen3", "qwen2_moe"])
def test_one_long_schedule_is_several_short_ones_bit_for_bit(
    two_ranks: dict[tuple[str, str], list[dict[str, Any]]], model: str
) -> None:
    for one, several in zip(two_ranks[model, "PP2 one schedule"], two_ranks[model, "PP2"], strict=True):
        assert [stats.loss for stats in one["trajectory"]] == [stats.loss for stats in several["trajectory"]]
        assert [stats.grad_norm for stats in one["trajectory"]] == [stats.grad_norm for stats in several["trajectory"]]
        assert one["tensors"].keys() == several["tensors"].keys()
        for name, tensor in one["tensors"].items():
            np.testing.assert_array_equal(tensor, several["tensors"][name], err_msg=name)


def test_three_steps_are_the_same_however_the_ranks_are_arranged(
    two_ranks: dict[tuple[str, str], list[dict[str, Any]]], one_rank: dict[str, dict[str, Any]]
) -> None:
    trained = [key for key, results in two_ranks.items() if results[0]["trajectory"] and "bf16" not in key[1]]
    assert len(trained) == 31
    for key in trained:
        expected = one_rank[alone(key)]["trajectory"]
        for rank in two_ranks[key]:
            for ours, theirs in zip(rank["trajectory"], expected, strict=True):
                assert ours.loss == pytest.approx(theirs.loss, abs=1e-4, rel=1e-4), key
                assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4), key
                assert (ours.lr, ours.tokens, ours.step) == (theirs.lr, theirs.tokens, theirs.step), key
                loads = {name: value for name, value in ours.metrics.items() if name.startswith("expert_load")}
                others = {name: value for name, value in ours.metrics.items() if name not in loads}
                assert others == pytest.approx({name: theirs.metrics[name] for name in others}, rel=1e-3, abs=1e-4), key
                # A prompt that its group's cut repeats counts again, and so does padding.
                assert loads == pytest.approx({name: theirs.metrics[name] for name in loads}, rel=0.05), key


def test_trained_weights_are_the_same_too(
    two_ranks: dict[tuple[str, str], list[dict[str, Any]]], one_rank: dict[str, dict[str, Any]]
) -> None:
    for key, results in two_ranks.items():
        if results[0]["trajectory"] and "bf16" not in key[1]:
            gathered = {name: tensor for rank in results for name, tensor in rank["tensors"].items()}
            expected = one_rank[alone(key)]["tensors"]
            assert gathered.keys() == expected.keys()
            for name, tensor in gathered.items():
                np.testing.assert_allclose(tensor, expected[name], atol=2e-3, err_msg=f"{key} {name}")


def test_candidates_are_those_of_one_rank_and_of_transformers(
    models: dict[str, Path], two_ranks: dict[tuple[str, str], list[dict[str, Any]]], one_rank: dict[str, dict[str, Any]]
) -> None:
    samples, count = make_samples(candidates=CANDIDATES["candidates"]), CANDIDATES["candidates"]
    model = transformers.AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float64)
    exact = []
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens)[None]).logits[0] / sample.temperature
        trained = np.flatnonzero(sample.loss_mask)
        exact.append((logits.log_softmax(-1)[trained - 1], sample.columns["candidates"][trained]))
    logprobs, candidates = torch.cat([one for one, _ in exact]), np.concatenate([ids for _, ids in exact])
    values, ids = logprobs.topk(count)
    given = logprobs.gather(-1, torch.from_numpy(candidates).long().clamp(min=0)).masked_fill_(
        torch.from_numpy(candidates) < 0, 0.0
    )
    worlds = {key: results for key, results in two_ranks.items() if "candidates" in key[1]} | {
        ("qwen3", "alone"): [one_rank["qwen3 candidates"]]
    }
    assert len(worlds) == 5
    masks = [pack(part).loss_mask != 0 for part in (samples[:3], samples[3:])]
    for key, results in worlds.items():
        for rank in results:
            found = [
                {name: values[mask] for name, values in one.items()}
                for one, mask in zip(rank["likeliest"], masks, strict=True)
            ]
            assert np.array_equal(np.concatenate([one["candidates"] for one in found]), ids.numpy()), key
            ours = np.concatenate([one["teacher_candidate_logprobs"] for one in found])
            np.testing.assert_allclose(ours, values.numpy(), atol=1e-4, err_msg=str(key))
            ours = np.concatenate([one[mask] for one, mask in zip(rank["candidates"], masks, strict=True)])
            np.testing.assert_allclose(ours, given.numpy(), atol=1e-4, err_msg=str(key))


def test_an_offloaded_optimizer_makes_the_same_updates(
    two_ranks: dict[tuple[str, str], list[dict[str, Any]]],
) -> None:
    for ours, theirs in zip(two_ranks["qwen3", "bf16 offloaded"], two_ranks["qwen3", "bf16"], strict=True):
        assert ours["trajectory"] == theirs["trajectory"]
        assert len(ours["trajectory"]) == 3
        for name, tensor in theirs["tensors"].items():
            assert np.array_equal(ours["tensors"][name], tensor), name


@pytest.mark.parametrize("model", ["llama_tied", "qwen3"])
def test_a_float32_head_rounds_nothing_with_a_divided_vocabulary_either(
    two_ranks: dict[tuple[str, str], list[dict[str, Any]]], model: str
) -> None:
    for head in (False, True):
        one, other = two_ranks[model, f"bf16 TP2 head {head}"]
        assert all(np.array_equal(a, b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))
        assert one["head_error"] == other["head_error"]
        assert (one["head_error"] < 1e-5) if head else (one["head_error"] > 1e-3)


def test_gathering_beside_training_sees_the_weights_before_the_step(
    models: dict[str, Path], two_ranks: dict[tuple[str, str], list[dict[str, Any]]], jobs: dict[tuple[str, str], Job]
) -> None:
    for key, results in two_ranks.items():
        if jobs[key].gather_beside:
            # "beside" holds the last step's gather: after two steps, so not the initial weights, nor the final ones.
            gathered = {name: tensor for rank in results for name, tensor in rank["beside"].items()}
            final = {name: tensor for rank in results for name, tensor in rank["tensors"].items()}
            initial = load_file(models[key[0]] / "model.safetensors")
            assert gathered.keys() == initial.keys()
            for name, tensor in gathered.items():
                assert not np.array_equal(tensor, initial[name].numpy()), (key, name)
                assert not np.array_equal(tensor, final[name]), (key, name)


def test_specs_foretell_what_is_gathered_and_by_whom(two_ranks: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    for key, results in two_ranks.items():
        for rank in results:
            expected = [spec for spec in rank["specs"] if spec[3] == rank["stage"] and rank["source"]]
            assert [(name, t.shape) for name, t in rank["tensors"].items()] == [(s[0], s[2]) for s in expected], key
        assert results[0]["specs"] == results[1]["specs"]


def test_logits_equal_those_of_transformers(
    models: dict[str, Path], two_ranks: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    samples = make_samples()
    for model, folder in models.items():
        with torch.no_grad():
            reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            expected = torch.cat([reference(torch.from_numpy(s.tokens)[None]).logits[0] for s in samples]).numpy()
        for way in ("TP2", "PP2"):
            results = two_ranks[model, f"{way} untrained"]
            ours = [rank["logits"] for rank in results if rank["logits"].size]
            assert len(ours) == (2 if way == "TP2" else 1)
            for logits in ours:
                np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=f"{model} {way}")


def test_log_probs_reach_every_rank(
    models: dict[str, Path], two_ranks: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    expected = {model: run_job(Job(folder))["logprobs"] for model, folder in models.items()}
    for (model, way), results in two_ranks.items():
        if "untrained" in way:
            for rank in results:
                for ours, theirs in zip(rank["logprobs"], expected[model], strict=True):
                    np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=f"{model} {way}")


def test_a_round_trip_changes_no_bit_and_transformers_loads_it(
    models: dict[str, Path], jobs: dict[tuple[str, str], Job], two_ranks: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    batch = torch.from_numpy(pack(make_samples()).tokens)[None]
    for (model, way), job in jobs.items():
        if job.save is None:
            continue
        original = load_file(models[model] / "model.safetensors")
        saved = {name: t for file in job.save.glob("*.safetensors") for name, t in load_file(file).items()}
        assert saved.keys() == original.keys(), (model, way)
        assert all(torch.equal(saved[name], original[name]) for name in original), (model, way)
        with torch.no_grad():
            ours = transformers.AutoModelForCausalLM.from_pretrained(job.save)(batch).logits
            theirs = transformers.AutoModelForCausalLM.from_pretrained(models[model])(batch).logits
        assert torch.equal(ours, theirs), (model, way)
        for gathered in zip(*(rank["beside_save"] for rank in two_ranks[model, way]), strict=True):
            beside = {name: tensor for rank in gathered for name, tensor in rank.items()}
            assert beside.keys() == original.keys(), (model, way)
            assert all(np.array_equal(beside[name], original[name].numpy()) for name in original), (model, way)
