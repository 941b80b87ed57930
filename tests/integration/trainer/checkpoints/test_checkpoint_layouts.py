"""Checkpoints of two gloo processes, loaded by as many or fewer, arranged as they were or otherwise; and the traps."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from services.trainer.learner import optimizer, snapshot
from services.trainer.learner.snapshot import COMMON
from tests.integration.trainer.checkpoints.checkpoint_worlds import CheckpointJob, run_job
from tests.integration.trainer.trainer_worlds import CP2, EP2, PP2, TP2, Job, make_learner, make_model, run_named
from tests.kit.megatron_world import shut_down

pytestmark = pytest.mark.night  # every layout is saved and loaded in every other one

DP2: dict[str, Any] = {}
UNEVEN: dict[str, Any] = {**PP2, "pipeline_layers": (2, 1)}
CHUNKS: dict[str, Any] = {**PP2, "pipeline_chunks": 2}
BF16: dict[str, Any] = {"dtype": "bfloat16"}
OFFLOADED: dict[str, Any] = {**BF16, "optimizer": {"cpu_offload": True}}
MOMENTS: dict[str, Any] = {"optimizer": {"moments": "bfloat16"}}
FLOAT8: dict[str, Any] = {"optimizer": {"moments": "float8"}}
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    # An odd vocabulary, so that two tensor-parallel ranks pad it and one doesn't; two models tied, one with biases.
    return {
        "qwen3": make_model(folder / "qwen3", "qwen3", tied=True),
        "llama": make_model(folder / "llama", "llama3"),
        "moe": make_model(folder / "moe", "qwen3_moe"),
        "hybrid": make_model(folder / "hybrid", "qwen3_5_text"),
        "deep": make_model(folder / "deep", "qwen3", tied=True, num_hidden_layers=3),
        "deeper": make_model(folder / "deeper", "qwen3", tied=True, num_hidden_layers=4),
    }


@pytest.fixture(scope="module")
def saved(folder: Path, models: dict[str, Path]) -> Results:
    """What happened in the worlds that saved, and that loaded what they had saved."""
    qwen3, llama, moe = models["qwen3"], models["llama"], models["moe"]
    jobs = {
        "DP1": CheckpointJob(qwen3, save=folder / "DP1"),
        "DP1 moments": CheckpointJob(qwen3, MOMENTS, save=folder / "DP1-moments"),
        "DP1 float8": CheckpointJob(qwen3, FLOAT8, save=folder / "DP1-float8"),
    }
    found = run_named(jobs, 1, folder / "alone")
    jobs = {
        "DP1 to DP2": CheckpointJob(qwen3, load=folder / "DP1"),
        "DP1 moments to DP2": CheckpointJob(qwen3, MOMENTS, load=folder / "DP1-moments"),
        "DP1 float8 to DP2": CheckpointJob(qwen3, FLOAT8, load=folder / "DP1-float8"),
        "float8": CheckpointJob(qwen3, FLOAT8, save=folder / "float8"),
        "float8 again": CheckpointJob(qwen3, FLOAT8, load=folder / "float8", same_layout=True),
        "float8 TP2": CheckpointJob(qwen3, {**FLOAT8, **TP2}, save=folder / "float8-TP2"),
        "float8 TP2 to PP2": CheckpointJob(qwen3, {**FLOAT8, **PP2}, load=folder / "float8-TP2"),
        "float8 to float32": CheckpointJob(qwen3, DP2, load=folder / "float8"),
        "TP2": CheckpointJob(qwen3, TP2, save=folder / "TP2"),
        "DP2": CheckpointJob(qwen3, DP2, save=folder / "DP2"),
        "PP2": CheckpointJob(qwen3, PP2, save=folder / "PP2"),
        "CP2": CheckpointJob(qwen3, CP2, save=folder / "CP2"),
        "llama TP2": CheckpointJob(llama, TP2, save=folder / "llama-TP2"),
        "EP2": CheckpointJob(moe, EP2, save=folder / "EP2"),
        "hybrid TP2": CheckpointJob(models["hybrid"], TP2, save=folder / "hybrid-TP2"),
        "hybrid TP2 again": CheckpointJob(models["hybrid"], TP2, load=folder / "hybrid-TP2", same_layout=True),
        "hybrid TP2 to PP2": CheckpointJob(models["hybrid"], PP2, load=folder / "hybrid-TP2"),
        "hybrid TP2 to DP2": CheckpointJob(models["hybrid"], DP2, load=folder / "hybrid-TP2"),
        "bf16": CheckpointJob(qwen3, BF16, save=folder / "bf16"),
        "offloaded": CheckpointJob(qwen3, OFFLOADED, save=folder / "offloaded"),
        "moments": CheckpointJob(qwen3, MOMENTS, save=folder / "moments"),
        "bf16 moments": CheckpointJob(qwen3, {**BF16, **MOMENTS}, save=folder / "bf16-moments"),
        "bf16 again": CheckpointJob(qwen3, BF16, load=folder / "bf16", same_layout=True),
        "offloaded again": CheckpointJob(qwen3, OFFLOADED, load=folder / "offloaded", same_layout=True),
        "moments again": CheckpointJob(qwen3, MOMENTS, load=folder / "moments", same_layout=True),
        "bf16 moments again": CheckpointJob(qwen3, {**BF16, **MOMENTS}, load=folder / "bf16-moments", same_layout=True),
        "moments to float32": CheckpointJob(qwen3, DP2, load=folder / "moments"),
        "float32 to moments": CheckpointJob(qwen3, MOMENTS, load=folder / "DP2"),
        "float32 to float8": CheckpointJob(qwen3, FLOAT8, load=folder / "DP2"),
        "TP2 again": CheckpointJob(qwen3, TP2, load=folder / "TP2", same_layout=True),
        "DP2 again": CheckpointJob(qwen3, DP2, load=folder / "DP2", same_layout=True),
        "PP2 again": CheckpointJob(qwen3, PP2, load=folder / "PP2", same_layout=True),
        "CP2 again": CheckpointJob(qwen3, CP2, load=folder / "CP2", same_layout=True),
        "CP2 to DP2": CheckpointJob(qwen3, DP2, load=folder / "CP2"),
        "PP2 to TP2": CheckpointJob(qwen3, TP2, load=folder / "PP2"),
        "EP2 again": CheckpointJob(moe, EP2, load=folder / "EP2", same_layout=True),
        "TP2 to PP2": CheckpointJob(qwen3, PP2, load=folder / "TP2"),
        "llama TP2 to PP2": CheckpointJob(llama, PP2, load=folder / "llama-TP2"),
        "TP2 to DP2": CheckpointJob(qwen3, DP2, load=folder / "TP2"),
        "moe TP2": CheckpointJob(moe, TP2, save=folder / "moe-TP2"),
        "EP2 to TP2": CheckpointJob(moe, TP2, load=folder / "EP2"),
        "EP2 to PP2": CheckpointJob(moe, PP2, load=folder / "EP2"),
        "uneven": CheckpointJob(models["deep"], UNEVEN, save=folder / "uneven"),
        "uneven again": CheckpointJob(models["deep"], UNEVEN, load=folder / "uneven", same_layout=True),
        "uneven otherwise": CheckpointJob(models["deep"], {**PP2, "pipeline_layers": (1, 2)}, load=folder / "uneven"),
        "uneven to TP2": CheckpointJob(models["deep"], TP2, load=folder / "uneven"),
        "moe TP2 to EP2": CheckpointJob(moe, EP2, load=folder / "moe-TP2"),
        "chunks": CheckpointJob(models["deeper"], CHUNKS, save=folder / "chunks"),
        "chunks again": CheckpointJob(models["deeper"], CHUNKS, load=folder / "chunks", same_layout=True),
        "chunks to none": CheckpointJob(models["deeper"], PP2, load=folder / "chunks"),
        "no chunks": CheckpointJob(models["deeper"], PP2, save=folder / "no-chunks"),
        "none to chunks": CheckpointJob(models["deeper"], CHUNKS, load=folder / "no-chunks"),
    }
    found |= run_named(jobs, 2, folder / "world")
    jobs = {
        "DP2 to DP1": CheckpointJob(qwen3, load=folder / "DP2"),
        "moments to DP1": CheckpointJob(qwen3, MOMENTS, load=folder / "moments"),
    }
    return found | run_named(jobs, 1, folder / "alone")


@pytest.fixture(scope="module")
def of_four(folder: Path, models: dict[str, Path]) -> Results:
    """What four ranks saved, loaded arranged otherwise, saved again at once, and loaded as they were at first."""
    model = models["qwen3"]
    jobs = {}
    for way, parallel, other in (("TP2 x DP2", TP2, PP2), ("PP2 x DP2", PP2, TP2)):
        first, second = folder / f"four {way}", folder / f"four {way} otherwise"
        jobs[way] = CheckpointJob(model, parallel, save=first)
        jobs[f"{way} otherwise"] = CheckpointJob(model, other, load=first, save=second)
        jobs[f"{way} back"] = CheckpointJob(model, parallel, load=second)
    return run_named(jobs, 4, folder / "four")


@pytest.fixture
def alone() -> Iterator[Any]:
    """Runs jobs in this process."""

    def run(job: CheckpointJob) -> dict[str, Any]:
        shut_down()
        return run_job(job)

    yield run
    shut_down()


def merged(results: list[dict[str, Any]], name: str) -> dict[str, np.ndarray]:
    return {key: tensor for rank in results for key, tensor in rank[name].items()}


def check_same_path(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same two steps, but for the order of sums."""
    assert ours["step"] == theirs["step"] == 4
    np.testing.assert_allclose(ours["trajectory"], theirs["trajectory"], rtol=1e-4)


def check_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=2e-3, err_msg=name)  # a fifth of the learning rate


@pytest.mark.parametrize(
    "way",
    [
        "TP2",
        "PP2",
        "DP2",
        "CP2",
        "EP2",
        "bf16",
        "offloaded",
        "moments",
        "bf16 moments",
        "float8",
        "uneven",
        "chunks",
        "hybrid TP2",
    ],
)
def test_the_same_ranks_go_on_bit_for_bit(saved: Results, way: str) -> None:
    for before, after in zip(saved[way], saved[f"{way} again"], strict=True):
        assert after["trajectory"] == before["trajectory"]
        assert after["drawn"] == before["drawn"]
        assert after["tensors"].keys() == before["tensors"].keys()
        for name, tensor in before["tensors"].items():
            assert np.array_equal(after["tensors"][name], tensor), name
            assert not np.array_equal(before["at_save"][name], tensor), name


@pytest.mark.parametrize(
    "ways",
    [
        ("TP2", "TP2 to PP2"),
        ("llama TP2", "llama TP2 to PP2"),
        ("TP2", "TP2 to DP2"),
        ("PP2", "PP2 to TP2"),
        ("hybrid TP2", "hybrid TP2 to PP2"),
        ("hybrid TP2", "hybrid TP2 to DP2"),
        ("EP2", "EP2 to TP2"),
        ("EP2", "EP2 to PP2"),
        ("moe TP2", "moe TP2 to EP2"),
        ("uneven", "uneven otherwise"),
        ("uneven", "uneven to TP2"),
        ("chunks", "chunks to none"),
        ("no chunks", "none to chunks"),
        ("float8 TP2", "float8 TP2 to PP2"),
    ],
)
def test_two_ranks_arranged_otherwise_go_on(saved: Results, ways: tuple[str, str]) -> None:
    before, after = (saved[way] for way in ways)
    at_save, at_load = merged(before, "at_save"), merged(after, "at_load")
    assert at_save.keys() == at_load.keys()
    assert all(np.array_equal(at_load[name], tensor) for name, tensor in at_save.items())
    for one, other in zip(before, after, strict=True):
        check_same_path(one, other)
    check_close(merged(after, "tensors"), merged(before, "tensors"))


@pytest.mark.parametrize("way", ["TP2 x DP2", "PP2 x DP2"])
def test_four_ranks_have_the_same_bits_there_and_back(of_four: Results, way: str) -> None:
    before, there, back = of_four[way], of_four[f"{way} otherwise"], of_four[f"{way} back"]
    weights = merged(before, "at_save")
    for loaded in (there, back):
        found = merged(loaded, "at_load")
        assert found.keys() == weights.keys()
        assert all(np.array_equal(found[name], tensor) for name, tensor in weights.items())
    for one, other in zip(before, back, strict=True):  # each rank's main weights and moments
        had, has = one["state_at_save"], other["state_at_load"]
        assert has.keys() == had.keys()
        assert any(name.endswith("exp_avg_sq") and tensor.any() for name, (_, tensor) in had.items())
        for name, (start, tensor) in had.items():
            assert has[name][0] == start, name
            assert np.array_equal(has[name][1], tensor), name
        check_same_path(one, other)


@pytest.mark.parametrize(
    ("model", "way"), [("qwen3", "TP2"), ("qwen3", "DP2"), ("moe", "EP2"), ("deep", "uneven"), ("deeper", "chunks")]
)
def test_one_rank_goes_on_where_two_were(
    saved: Results, model: str, way: str, folder: Path, models: dict[str, Path], alone: Any
) -> None:
    result = alone(CheckpointJob(models[model], load=folder / way))
    check_same_path(result, saved[way][0])
    check_close(result["tensors"], merged(saved[way], "tensors"))


def moments_in(folder: Path) -> set[torch.dtype]:
    """The element types of the moments in a checkpoint."""
    found = set()
    for path in folder.glob("rank-*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_tensor(name).dtype for name in file.keys() if "/exp_avg" in name}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("way", "other"),
    [
        ("moments", "moments to float32"),
        ("DP2", "float32 to moments"),
        ("float8", "float8 to float32"),
        ("DP2", "float32 to float8"),
    ],
)
def test_a_checkpoint_with_moments_of_the_other_type_is_converted(
    saved: Results, way: str, other: str, folder: Path
) -> None:
    assert moments_in(folder / way) == {torch.float32 if way == "DP2" else torch.bfloat16}
    for before, after in zip(saved[way], saved[other], strict=True):
        # Rounding 24 bits to 8 changes an update by less than a hundredth of the learning rate.
        np.testing.assert_allclose(after["trajectory"], before["trajectory"], rtol=2e-3)
        check_close(after["tensors"], before["tensors"])


def whole(results: list[dict[str, Any]], name: str) -> dict[str, np.ndarray]:
    """The optimizers' state of whole parameters, of which each data-parallel rank has a part."""
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for rank in results:
        for key, part in rank[name].items():
            parts.setdefault(key, []).append(part)
    found = {}
    for key, some in parts.items():
        some.sort(key=lambda part: part[0])
        assert [start for start, _ in some] == np.cumsum([0, *(len(part) for _, part in some)])[:-1].tolist(), key
        found[key] = np.concatenate([part for _, part in some])
    return found


@pytest.mark.parametrize(
    "ways",
    [
        ("DP2", "DP2 to DP1"),
        ("moments", "moments to DP1"),
        ("DP1", "DP1 to DP2"),
        ("DP1 moments", "DP1 moments to DP2"),
        ("DP1 float8", "DP1 float8 to DP2"),
        ("CP2", "CP2 to DP2"),
    ],
)
def test_another_number_of_ranks_gets_the_same_bits(saved: Results, ways: tuple[str, str]) -> None:
    before, after = (saved[way] for way in ways)
    had, has = whole(before, "state_at_save"), whole(after, "state_at_load")
    assert had.keys() == has.keys()
    assert any(name.endswith("exp_avg_sq") and tensor.any() for name, tensor in had.items())
    assert all(np.array_equal(has[name], tensor) for name, tensor in had.items())
    weights, loaded = merged(before, "at_save"), merged(after, "at_load")
    assert weights.keys() == loaded.keys()
    assert all(np.array_equal(loaded[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("way", ["DP2", "CP2", "moments", "float8", "TP2"])
def test_a_rank_copies_and_writes_its_own_half(saved: Results, folder: Path, way: str) -> None:
    alone = saved[f"DP1 {way}" if way in ("moments", "float8") else "DP1"][0]
    for name in ("memory", "files"):
        found = [rank[name] for rank in saved[way]]
        if name == "files":
            found = [sum(file["bytes"] for part, file in files.items() if part != COMMON) for files in found]
        assert max(found) < 1.1 * min(found), (name, found)
    assert sum(rank["memory"] for rank in saved[way]) == pytest.approx(alone["memory"], rel=0.02)


def test_one_rank_rounds_as_two_did(saved: Results, folder: Path, models: dict[str, Path], alone: Any) -> None:
    result = alone(CheckpointJob(models["qwen3"], MOMENTS, load=folder / "moments"))
    check_same_path(result, saved["moments"][0])
    check_close(result["tensors"], merged(saved["moments"], "tensors"))


def test_trap_1_a_fresh_optimizer_has_no_state_to_save(
    models: dict[str, Path], tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "fill", lambda optimizer: None)
    with pytest.raises(AssertionError):
        make_learner(Job(models["qwen3"])).snapshot(tmp_path)


def test_trap_2_one_step_for_all_parameters_counts_too_fast(
    saved: Results, folder: Path, models: dict[str, Path], alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_separate_steps", lambda optimizer: None)
    wrong = alone(CheckpointJob(models["qwen3"], load=folder / "DP2"))
    right = saved["DP2"][0]
    assert wrong["trajectory"][0] == pytest.approx(right["trajectory"][0], rel=1e-4)  # nothing to see yet
    with pytest.raises(AssertionError):
        check_same_path(wrong, right)


def test_a_checkpoint_of_an_earlier_format_is_refused(
    saved: Results, folder: Path, models: dict[str, Path], tmp_path: Path, alone: Any
) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(folder / "DP2", earlier)
    (earlier / COMMON).rename(earlier / "common.pt")
    with pytest.raises(snapshot.CheckpointError, match=r"is a checkpoint of an earlier release.*has common\.pt"):
        alone(CheckpointJob(models["qwen3"], load=earlier))


def test_a_checkpoint_of_another_model_is_refused(
    saved: Results, folder: Path, models: dict[str, Path], alone: Any
) -> None:
    with pytest.raises(snapshot.CheckpointError, match="doesn't fit this model and trainer"):
        alone(CheckpointJob(models["llama"], load=folder / "DP2"))
