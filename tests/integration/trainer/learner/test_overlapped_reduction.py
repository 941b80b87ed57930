"""Gradients that are reduced during the backward pass are those that are reduced after it."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from tests.integration.trainer.learner.reduction_worlds import ReductionJob, merged, run_of
from tests.integration.trainer.trainer_worlds import make_model, run_named
from tests.kit.redis.redis_server import RedisServer

pytestmark = pytest.mark.night

FROZEN = {"moe": {"freeze_router": True, "aux_loss_coef": 0.0}}
JOBS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "qwen3"},
    "tied": {"kind": "llama", "tied": True, "parallel": {"recompute": "full"}},
    "experts": {"kind": "qwen2_moe", "parallel": {"expert_parallel": 2}},
    "frozen router": {"kind": "qwen3_moe", "parallel": {"recompute": "selective", **FROZEN}},
    "empty rank": {"kind": "qwen3", "samples": 1},
    "CP2": {"kind": "qwen3", "parallel": {"context_parallel": 2}},
}
"""Models and layouts of two ranks, each with a policy and a critic."""
VARIANTS: dict[str, dict[str, Any]] = {
    "one call": {"calls": 1},
    "unannounced": {"announced": False},
    "nap": {"nap": True},
    "dropped": {"drop": True},
    "one bucket": {"bucket": 10**9},
}
"""Other ways to train the dense model."""
WIDE: dict[str, dict[str, Any]] = {
    "PP2xDP2": {"kind": "qwen3", "parallel": {"pipeline_parallel": 2}},
    "PP2xDP2, tied": {"kind": "llama", "tied": True, "layers": 4, "parallel": {"pipeline_parallel": 2}},
    "PP2xDP2, chunks": {
        "kind": "llama",
        "tied": True,
        "layers": 4,
        "parallel": {"pipeline_parallel": 2, "pipeline_chunks": 2},
    },
    "TP2xDP2": {"kind": "qwen3", "parallel": {"tensor_parallel": 2}},
}
"""Layouts of four ranks."""
RUNS: dict[str, dict[str, Any]] = {"while filling": {}, "two updates": {"mini_batches": 2}}

Results = dict[str, list[dict[str, Any]]]


def jobs_of(table: dict[str, dict[str, Any]], root: Path) -> dict[str, ReductionJob]:
    jobs = {}
    for name, settings in table.items():
        own = dict(settings)
        kind, tied, layers = own.pop("kind"), own.pop("tied", False), own.pop("layers", 2)
        folder = root / f"{kind}-{tied}-{layers}"
        model = folder if folder.exists() else make_model(folder, kind, tied=tied, num_hidden_layers=layers)
        jobs[name] = ReductionJob(model, True, **own)
        jobs[f"{name}, plain"] = replace(jobs[name], overlap=False)
    return jobs


@pytest.fixture(scope="module")
def results(session_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("reduction")
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    jobs: dict[str, Any] = dict(jobs_of(JOBS, root))
    jobs |= {name: replace(jobs["dense"], **changes) for name, changes in VARIANTS.items()}
    number = 0
    for name, settings in RUNS.items():
        for overlap in (True, False):
            number += 1
            key, own = name if overlap else f"{name}, plain", {**settings, "overlap_grad_reduce": overlap}
            jobs[key] = run_of(root / "qwen3-False-2", session_redis.url, number, root / key, **own)
        jobs[f"{name}, again"] = jobs[name]  # the next trainer, which repeats the steps from their files
    return run_named(jobs, 2, root / "ranks")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("wide")
    jobs = jobs_of(WIDE, root)
    return run_named(jobs, 4, root / "ranks")


def check_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], replicas: list[list[int]]) -> None:
    """Compare two ways bit for bit, but for the gradients' norms. `replicas`: ranks that share parameters."""
    for ranks in replicas:
        one, other = (merged([way[rank]["gradients"][0] for rank in ranks]) for way in (ours, theirs))
        assert one.keys() == other.keys()
        for name, values in other.items():
            np.testing.assert_array_equal(one[name], values, err_msg=name)
    for mine, plain in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            [number[:2] for number in mine["numbers"]], [number[:2] for number in plain["numbers"]], rtol=1e-5
        )
        for name, tensor in plain["tensors"].items():
            np.testing.assert_array_equal(mine["tensors"][name], tensor, err_msg=name)


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_get_the_same_gradients_and_weights(results: Results, name: str) -> None:
    ours, theirs = results[name], results[f"{name}, plain"]
    check_same(ours, theirs, [[0, 1]])
    for rank in ours:
        for update in rank["early"]:
            assert all(early == count > 1 for early, count in zip(update, rank["buckets"], strict=True)), rank["early"]
    assert [rank["early"] for rank in theirs] == [[[0, 0]] * 4] * 2
    assert [rank["buckets"] for rank in theirs] < [rank["buckets"] for rank in ours]


@pytest.mark.parametrize("name", VARIANTS)
def test_calls_naps_and_dropped_gradients_make_no_difference(results: Results, name: str) -> None:
    ours, dense = results[name], results["dense"]
    for mine, other in zip(ours, dense, strict=True):
        assert any(map(any, mine["early"])) == (name != "unannounced")
        if name != "one bucket":
            assert mine["numbers"] == other["numbers"]
            assert mine["checksum"] == other["checksum"], "bit for bit"
    if name == "one bucket":  # the shares of the plain way, and so its norms
        for mine, other in zip(ours, results["dense, plain"], strict=True):
            assert mine["numbers"] == other["numbers"]
            assert mine["checksum"] == other["checksum"], "bit for bit"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_repeated_bit_for_bit(results: Results, name: str) -> None:
    (ours, _), (theirs, _), (again, _) = (results[f"{name}{way}"] for way in ("", ", plain", ", again"))
    for entry, plain in zip(ours["ledger"], theirs["ledger"], strict=True):
        assert entry.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5)
        assert entry.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-5)
    for rank, (first, second) in enumerate(zip(results[name], results[f"{name}, again"], strict=True)):
        for key, tensor in results[f"{name}, plain"][rank]["tensors"].items():
            np.testing.assert_array_equal(first["tensors"][key], tensor, err_msg=key)
            np.testing.assert_array_equal(second["tensors"][key], first["tensors"][key], err_msg=key)
    assert len(again["ledger"]) == 2


@pytest.mark.parametrize("name", WIDE)
def test_pipelines_and_tensor_parallel_ranks(wide: Results, name: str) -> None:
    ours, theirs = wide[name], wide[f"{name}, plain"]
    replicas = [[0, 1], [2, 3]] if name.startswith("PP") else [[0, 2], [1, 3]]
    check_same(ours, theirs, replicas)
    assert all(early == rank["buckets"] for rank in ours for early in rank["early"])


def test_chunks_of_stages_make_no_difference(wide: Results) -> None:
    """To policy and critic. Sums of squares are rounded otherwise."""
    ours, theirs = wide["PP2xDP2, chunks"], wide["PP2xDP2, tied"]
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip(mine["numbers"], other["numbers"], strict=True):
            assert one[:2] == pytest.approx(two[:2], rel=1e-4, abs=1e-5)
            assert dict(one[2:]) == pytest.approx(dict(two[2:]), rel=1e-3, abs=1e-4)
    found, expected = ({name: x for rank in way for name, x in rank["tensors"].items()} for way in (ours, theirs))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-3, err_msg=name)
