"""Ranks that keep shards of their gradients train as those that keep all of them, in a part of the memory."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from relaxd.models.layouts import Layout, stage_parameters
from relaxd.models.shape import read_shape
from relaxd.tools.fitting.trainer_memory import buckets_in_memory, sharded_parameters
from tests.integration.trainer.learner.reduction_worlds import BUCKET, ReductionJob, merged, run_of
from tests.integration.trainer.trainer_worlds import make_model, run_named, trainer_config
from tests.kit.redis.redis_server import RedisServer

pytestmark = pytest.mark.slow

FROZEN = {"moe": {"freeze_router": True, "aux_loss_coef": 0.0}}
JOBS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "qwen3"},
    "tied": {"kind": "llama", "tied": True, "parallel": {"recompute": "full"}},
    "experts": {"kind": "qwen2_moe", "parallel": {"expert_parallel": 2}},
    "frozen router": {"kind": "qwen3_moe", "parallel": {"recompute": "selective", **FROZEN}},
    "empty rank": {"kind": "qwen2_moe", "samples": 1, "parallel": {"expert_parallel": 2}},
    "CP2": {"kind": "qwen3", "parallel": {"context_parallel": 2}},
    "bfloat16 moments": {"kind": "qwen3", "parallel": {"optimizer": {"moments": "bfloat16"}}},
    "offloaded optimizer": {"kind": "qwen3", "parallel": {"dtype": "bfloat16", "optimizer": {"cpu_offload": True}}},
}
"""Models and layouts of two ranks, each with a policy and a critic."""
VARIANTS: dict[str, dict[str, Any]] = {
    "overlapped": {"overlap": True},
    "one call": {"calls": 1},
    "nap": {"nap": True},
    "dropped": {"drop": True},
}
"""Other ways to train the dense model, with the same sums."""
PAIRS: dict[str, dict[str, Any]] = {"whole": {"whole": True}, "lacking": {"lacking": True}}
"""Other ways to train the dense model, with and without shards."""
WIDE: dict[str, dict[str, Any]] = {
    "PP2xDP2, tied": {"kind": "llama", "tied": True, "parallel": {"pipeline_parallel": 2}},
    "TP2xDP2": {"kind": "qwen3", "parallel": {"tensor_parallel": 2}},
    "EP2xDP4": {"kind": "qwen2_moe", "parallel": {"expert_parallel": 2}},
}
"""Layouts of four ranks."""
REPLICAS = {"TP": [[0, 2], [1, 3]], "EP": [[0, 1, 2, 3]]}
"""Ranks that share parameters, where they aren't neighbours."""

Results = dict[str, list[dict[str, Any]]]


def jobs_of(table: dict[str, dict[str, Any]], root: Path) -> dict[str, ReductionJob]:
    """Jobs with sharded gradients and without."""
    jobs = {}
    for name, settings in table.items():
        own = dict(settings)
        kind, tied = own.pop("kind"), own.pop("tied", False)
        folder = root / f"{kind}-{tied}"
        model = folder if folder.exists() else make_model(folder, kind, tied=tied)
        jobs[name] = ReductionJob(model, False, shard=True, updates=2, **own)
        # Overlapped, so that there are the same buckets.
        jobs[f"{name}, plain"] = replace(jobs[name], shard=False, overlap=True)
    return jobs


@pytest.fixture(scope="module")
def jobs(session_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("shards")
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    jobs: dict[str, Any] = dict(jobs_of(JOBS, root))
    jobs |= {name: replace(jobs["dense"], **changes) for name, changes in VARIANTS.items()}
    jobs["poisoned"] = replace(jobs["dense"], poison=1)
    for name, changes in PAIRS.items():
        jobs |= {f"{name}{way}": replace(jobs[f"dense{way}"], **changes) for way in ("", ", plain")}
    jobs["run"] = run_of(root / "qwen3-False", session_redis.url, 1, root / "run", shard_gradients=True)
    jobs["run, plain"] = run_of(root / "qwen3-False", session_redis.url, 2, root / "plain")
    jobs["run, again"] = jobs["run"]  # the next trainer, which repeats the steps from their files
    return jobs


@pytest.fixture(scope="module")
def results(jobs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("world")
    return run_named(jobs, 2, root / "ranks")


@pytest.fixture(scope="module")
def wide_jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(jobs_of(WIDE, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def wide(wide_jobs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("wide")
    return run_named(wide_jobs, 4, root / "ranks")


def check_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], replicas: list[list[int]]) -> None:
    """Compare two ways, which add up the same float32 numbers in another order.

    The first update's gradients differ by a few roundings (6e-8) of the largest one. `replicas`: ranks that share
    parameters.
    """
    for ranks in replicas:
        one, other = (merged([way[rank]["gradients"][0] for rank in ranks]) for way in (ours, theirs))
        assert one.keys() == other.keys()
        for name, values in other.items():
            np.testing.assert_allclose(one[name], values, rtol=0, atol=1e-6 * np.abs(values).max(), err_msg=name)
    for mine, plain in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            [number[:2] for number in mine["numbers"]], [number[:2] for number in plain["numbers"]], rtol=1e-4
        )
        for name, tensor in plain["tensors"].items():  # an update changes them by up to 1e-2
            np.testing.assert_allclose(mine["tensors"][name], tensor, rtol=0, atol=1e-4, err_msg=name)


def check_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Compare two ways bit for bit."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["numbers"] == other["numbers"]
        assert mine["checksum"] == other["checksum"]
        for name, tensor in other["tensors"].items():
            np.testing.assert_array_equal(mine["tensors"][name], tensor, err_msg=name)


def check_memory(job: ReductionJob, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], ranks: int) -> None:
    """Compare a policy's bytes of gradients, and the buckets of a backward pass, with what `relaxd fit` predicts."""
    settings = {"shard_gradients": True, "overlap_grad_reduce": job.overlap, **job.parallel}
    layout = Layout.of_trainer(trainer_config(ranks, **settings))
    for stage, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
        stage = stage * layout.pipeline // ranks
        shape = read_shape(job.model)
        own = stage_parameters(shape, layout, stage)
        sharded, whole = 4 * sharded_parameters(own, layout), 4 * own.all
        if "moe" not in job.parallel:  # routers that aren't trained have no gradients
            assert whole <= plain["bytes"][0][0] < 1.1 * whole
        for policy, _ in mine["bytes"]:
            assert 0.95 * sharded <= policy < 1.1 * sharded, "between micro-batches"
        buckets = buckets_in_memory(shape, layout, stage, least=BUCKET)
        assert mine["peaks"][0] <= 1.1 * sharded + 1.1 * buckets
        assert mine["peaks"][0] >= 0.95 * sharded + 0.4 * buckets


def check_early(ranks: list[dict[str, Any]]) -> None:
    """Check that each bucket was reduced as soon as it was complete."""
    for rank in ranks:
        for early, late in zip(rank["early"], rank["late"], strict=True):
            assert all(count >= buckets > 1 for count, buckets in zip(early, rank["buckets"], strict=True))
            assert late == [0, 0]


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_get_the_same_gradients_and_weights(results: Results, name: str) -> None:
    check_close(results[name], results[f"{name}, plain"], [[0, 1]])
    check_early(results[name])


@pytest.mark.night
@pytest.mark.parametrize("name", JOBS)
def test_a_rank_holds_its_share_and_a_few_buckets(results: Results, jobs: dict[str, Any], name: str) -> None:
    check_memory(jobs[name], results[name], results[f"{name}, plain"], 2)


@pytest.mark.night
@pytest.mark.parametrize("name", ["whole", "empty rank"])
def test_one_micro_batch_is_the_same_bit_for_bit(results: Results, name: str) -> None:
    check_same(results[name], results[f"{name}, plain"])


@pytest.mark.night
@pytest.mark.parametrize("name", VARIANTS)
def test_calls_naps_and_dropped_gradients_make_no_difference(results: Results, name: str) -> None:
    check_same(results[name], results["dense"])


@pytest.mark.night
def test_a_layer_may_lack_a_gradient(results: Results) -> None:
    check_close(results["lacking"], results["lacking, plain"], [[0, 1]])
    assert all(any(policy for policy, _ in rank["late"]) for rank in results["lacking"])
    # More gradients than were announced are not hidden.
    for rank in results["dense"]:
        several, after = rank["refusals"]
        assert "several gradients in one backward pass" in several
        assert "after the last ones of an update" in after


def test_an_update_is_skipped_where_a_shard_is_not_finite(results: Results) -> None:
    for mine, other in zip(results["poisoned"], results["dense"], strict=True):
        assert (mine["skipped"], other["skipped"]) == ([False, True], [False, False])
        assert mine["checksums"] == [other["checksums"][0]] * 2
        assert np.isnan(mine["numbers"][1][1])


@pytest.mark.night
def test_a_run_is_repeated_bit_for_bit(results: Results) -> None:
    (ours, _), (theirs, _), (again, _) = (results[f"run{way}"] for way in ("", ", plain", ", again"))
    for entry, plain in zip(ours["ledger"], theirs["ledger"], strict=True):
        assert entry.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-4)
        assert entry.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-4)
    for first, second in zip(results["run"], results["run, again"], strict=True):
        for key, tensor in first["tensors"].items():
            np.testing.assert_array_equal(second["tensors"][key], tensor, err_msg=key)
    assert len(again["ledger"]) == 2


@pytest.mark.night
@pytest.mark.parametrize("name", WIDE)
def test_four_ranks(wide: Results, wide_jobs: dict[str, Any], name: str) -> None:
    ours, theirs = wide[name], wide[f"{name}, plain"]
    check_close(ours, theirs, REPLICAS.get(name[:2], [[0, 1], [2, 3]]))
    check_early(ours)
    check_memory(wide_jobs[name], ours, theirs, 4)
