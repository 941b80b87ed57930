"""Context parallelism whatever the heads: log-probs, loss and gradients of a packed micro-batch as on one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.trainer.learner.context_worlds import Job, run_job
from tests.integration.trainer.trainer_worlds import CP2, make_model, run_named

CP4 = {"context_parallel": 4}
SIZES: dict[str, tuple[str, int, int]] = {
    "4 heads, 2 kv": ("qwen3", 4, 2),
    "4 heads, 1 kv": ("qwen3", 4, 1),
    "3 heads, 1 kv": ("qwen3", 3, 1),
    "6 heads, 2 kv": ("qwen3", 6, 2),
    "window, 3 heads": ("qwen2_sliding", 3, 1),
    "experts, 3 heads": ("qwen3_moe", 3, 1),
}
TWO: dict[tuple[str, str], dict[str, Any]] = {
    ("4 heads, 1 kv", "copies"): CP2,
    ("4 heads, 1 kv", "copies, selective"): {**CP2, "recompute": "selective"},
    ("3 heads, 1 kv", "gather"): CP2,
    ("3 heads, 1 kv", "gather, selective"): {**CP2, "recompute": "selective"},
    ("3 heads, 1 kv", "gather, full"): {**CP2, "recompute": "full", "activation_offload_bytes": 1 << 26},
    ("window, 3 heads", "gather"): CP2,
    ("experts, 3 heads", "gather"): CP2,
    ("4 heads, 1 kv", "copies, long prompt"): CP2,
    ("3 heads, 1 kv", "gather, long prompt"): CP2,
    ("4 heads, 2 kv", "long prompt, TP2"): {"tensor_parallel": 2},
}
LONG = 90
"""Tokens of a prompt that makes attention take its queries once."""
FOUR: dict[tuple[str, str], dict[str, Any]] = {
    ("4 heads, 2 kv", "copies"): CP4,
    ("4 heads, 1 kv", "copies"): CP4,
    ("3 heads, 1 kv", "gather"): CP4,
    ("6 heads, 2 kv", "exchange and gather"): CP4,
    ("6 heads, 2 kv", "exchange and gather, full"): {**CP4, "recompute": "full"},
    ("6 heads, 2 kv", "gather, DP2"): CP2,
    ("4 heads, 2 kv", "copies, TP2"): {**CP2, "tensor_parallel": 2},
    ("6 heads, 2 kv", "gather, TP2"): {**CP2, "tensor_parallel": 2, "recompute": "selective"},
    ("3 heads, 1 kv", "gather, PP2"): {
        **CP2, "pipeline_parallel": 2, "recompute": "selective", "activation_offload_bytes": 1 << 26
    },
    ("experts, 3 heads", "gather, EP2"): {**CP4, "expert_parallel": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_model(root / name, kind, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
        for name, (kind, heads, kv_heads) in SIZES.items()
    }


def check(models: dict[str, Path], ways: dict[tuple[str, str], dict[str, Any]], ranks: int, folder: Path) -> None:
    jobs = {
        key: Job(models[key[0]], way, "experts" in key[0], *((LONG, True) if "long" in key[1] else ()))
        for key, way in ways.items()
    }
    found = run_named(jobs, ranks, folder)
    alone = {
        (name, tokens): run_job(Job(models[name], {}, "experts" in name, tokens))
        for name, tokens in {(name, job.prompt_tokens) for (name, _), job in jobs.items()}
    }
    for key, job in jobs.items():
        expected = alone[key[0], job.prompt_tokens]
        replicas = 2 if "DP2" in key[1] else 1
        for result in found[key]:
            assert result["sliced"] or "long" not in key[1]
            np.testing.assert_allclose(result["logprobs"], expected["logprobs"], atol=2e-5, err_msg=str(key))
            assert result["loss"] == pytest.approx(replicas * expected["loss"], rel=1e-4, abs=1e-5), key
            assert result["grad_norm"] == pytest.approx(replicas * expected["grad_norm"], rel=1e-4), key
            if "EP2" not in key[1]:
                for name, gradient in result.get("gradients", {}).items():
                    exact = replicas * expected["gradients"][name]
                    assert np.linalg.norm(gradient - exact) < 1e-4 * np.linalg.norm(exact), (key, name)
            for ours, theirs in zip(result.get("experts", []), expected.get("experts", []), strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=str(key))


def test_two_ranks_are_one(models: dict[str, Path], tmp_path: Path) -> None:
    check(models, TWO, 2, tmp_path / "world")


@pytest.mark.parametrize("name", SIZES)
def test_queries_of_a_long_shared_prompt_are_taken_once_with_the_same_result(
    models: dict[str, Path], name: str
) -> None:
    once, copied = (
        run_job(Job(models[name], {}, "experts" in name, LONG, prompts_once=here)) for here in (True, False)
    )
    assert once["sliced"]
    assert not copied["sliced"]
    np.testing.assert_allclose(once["logprobs"], copied["logprobs"], atol=2e-5)
    assert once["loss"] == pytest.approx(copied["loss"], rel=1e-4, abs=1e-5)
    for gradient, exact in zip(once["gradients"].values(), copied["gradients"].values(), strict=True):
        assert np.linalg.norm(gradient - exact) < 1e-4 * np.linalg.norm(exact)


@pytest.mark.night
def test_four_ranks_are_one(models: dict[str, Path], tmp_path: Path) -> None:
    check(models, FOUR, 4, tmp_path / "world")
