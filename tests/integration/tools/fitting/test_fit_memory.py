"""`relaxd fit`'s arithmetic against the real model: parameters of every family and layout, and what autograd keeps."""

from pathlib import Path
from typing import Any

import pytest

from relaxd.config import TrainerConfig
from relaxd.models.layouts import Layout, model_parameters, stage_parameters
from relaxd.models.shape import read_shape
from relaxd.tools.fitting.activations import MicroBatch, saved_by_part
from relaxd.tools.fitting.trainer_memory import in_flight, sharded_parameters
from tests.integration.tools.fitting.fit_worlds import LENGTH, Job, run_job, write_model
from tests.integration.trainer.trainer_worlds import KINDS, run_world, trainer_config

RECOMPUTE = ("none", "selective", "full")


def layout_of(job: Job, ranks: int) -> Layout:
    config: TrainerConfig = trainer_config(ranks, **job.settings)
    return Layout.of_trainer(config)


def check_parameters(job: Job, found: dict[str, Any], ranks: int) -> None:
    """Compare the parameters of policies and critics on a rank with the arithmetic."""
    layout, stage = layout_of(job, ranks), found["stage"]
    for folder, counts in zip(job.folders, found["parameters"], strict=True):
        shape = read_shape(folder)
        expected = [stage_parameters(shape, layout, stage, critic=critic).all for critic in (False, True)]
        assert counts == expected, f"{folder.name}, {layout.name}, stage {stage}"


def check_step(job: Job, found: dict[str, Any], ranks: int = 1) -> None:
    """Compare what a step keeps on a rank with the arithmetic."""
    shape, layout, stage = read_shape(job.folders[0]), layout_of(job, ranks), found["stage"]
    own, what = stage_parameters(shape, layout, stage), f"{job.folders[0].name}, {layout.name}, stage {stage}"
    assert 4 * own.all <= found["gradients"] < 4.1 * own.all, what  # padded for the optimizer's shards
    assert found["moments"] == pytest.approx(8 * sharded_parameters(own, layout), rel=0.02), what
    batch = MicroBatch(found["tokens"], 4 * LENGTH, fused=False, element=4)
    expected = sum(saved_by_part(shape, layout, batch).values()) * in_flight(layout, stage)
    assert expected == pytest.approx(found["saved"], rel=0.1), what


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("kind", "prompt"), [("qwen3", 0), ("qwen3", 32), ("qwen2_moe", 0), ("qwen3_5_text", 32)])
def test_saved_activations(
    tmp_path_factory: pytest.TempPathFactory, kind: str, prompt: int, recompute: str, alone: None
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"fit-{kind}"
    if not folder.exists():
        write_model(folder, kind, wide=True)
    job = Job((folder,), {"recompute": recompute}, micro_batches=1, prompt=prompt)
    check_step(job, run_job(job))


def test_the_whole_models_parameters(tmp_path: Path, alone: None) -> None:
    folders = write_model(tmp_path / "dense", "qwen3", tied=True), write_model(tmp_path / "mixture", "qwen2_moe")
    found = run_job(Job(folders))["parameters"]
    assert [policy for policy, _ in found] == [model_parameters(read_shape(folder)) for folder in folders]


@pytest.mark.night
@pytest.mark.timeout(180)
def test_what_two_ranks_hold(tmp_path: Path) -> None:
    """Parameters of every family under each kind of parallelism; a step's memory of a dense model and a mixture."""
    every = [write_model(tmp_path / kind, kind) for kind in KINDS]
    every += [write_model(tmp_path / f"{kind}-tied", kind, tied=True) for kind in ("llama", "qwen2_moe")]
    mixtures = [folder for folder in every if "moe" in folder.name]
    wide = [write_model(tmp_path / f"{kind}-wide", kind, wide=True) for kind in ("qwen3", "qwen3_moe")]
    divided = ({"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2})
    jobs = [Job(tuple(every), settings) for settings in divided[:2]]
    jobs.append(Job(tuple(one for one in every if read_shape(one).delta_net is None), divided[2]))
    jobs += [Job((folder,), settings, micro_batches=2) for folder in wide for settings in divided]
    jobs += [Job(tuple(mixtures), {"expert_parallel": 2}), Job((wide[1],), {"expert_parallel": 2}, micro_batches=2)]
    jobs.append(Job((wide[0],), {"pipeline_parallel": 2, "pipeline_chunks": 2}, micro_batches=6))
    results = run_world(jobs, 2, tmp_path / "world")
    for job, found in ((job, found) for job, ranks in zip(jobs, results, strict=True) for found in ranks):
        (check_step if job.micro_batches else check_parameters)(job, found, 2)
