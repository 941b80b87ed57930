"""A pipeline trains as one process does, whose stages have different numbers of layers, or several chunks of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from services.trainer.model.architecture import ModelError
from tests.integration.trainer.learner.pipeline_worlds import PipelineJob, run_job
from tests.integration.trainer.trainer_worlds import PP2, Job, make_learner, make_model, run_named, run_world
from tests.kit.megatron_world import shut_down

pytestmark = pytest.mark.slow  # two processes load torch and Megatron

LAYERS = 4
CHUNKS = {"pipeline_chunks": 2}
SAVED = "saved-in-chunks"
TRAIN: dict[str, Any] = {"steps": 3, "pieces": 3, "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, fewer at the end": ("llama_tied", {"pipeline_layers": (3, 1)}),
    "tied, fewer at the beginning": ("llama_tied", {"pipeline_layers": (1, 3), "recompute": "full"}),
    "tied, equally many": ("llama_tied", {}),
    "experts": ("qwen3_moe", {"pipeline_layers": (3, 1), "recompute": "selective", "recompute_layers": 2}),
    "chunks, tied": ("llama_tied", CHUNKS),
    "chunks, recomputed": ("llama_tied", {**CHUNKS, "recompute": "full", "recompute_layers": 1}),
    "chunks, activations on the host": ("llama_tied", {**CHUNKS, "activation_offload_bytes": 1 << 26}),
    "chunks, experts": ("qwen3_moe", {**CHUNKS, "recompute": "selective", "recompute_layers": 1}),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "chunks, recomputed": {
        "pieces": 7,
        "one_schedule": True,
    },  # which makes 5 micro-batches: 3 go through chunks, then 2
    "chunks, activations on the host": {"pieces": 2, "one_schedule": True, "nap": True},
    "chunks, experts": {"one_schedule": True},  # an empty micro-batch's token would count in the experts' load
}
"""Other schedules than of one micro-batch, which is less than the stages, and of those that are left."""
MIXTURES = [case for case, (model, _) in CASES.items() if model == "qwen3_moe"]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    tied = make_model(root / "llama_tied", "llama", tied=True, num_hidden_layers=LAYERS)
    return {"llama_tied": tied, "qwen3_moe": make_model(root / "qwen3_moe", "qwen3_moe", num_hidden_layers=LAYERS)}


@pytest.fixture(scope="module")
def pipelines(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("world")
    settings = {case: {**TRAIN, **SCHEDULES.get(case, {})} for case in CASES}
    settings["chunks, tied"]["save"] = models["llama_tied"].with_name(SAVED)
    jobs = {case: PipelineJob(models[model], PP2 | own, **settings[case]) for case, (model, own) in CASES.items()}
    return run_named(jobs, 2, folder)


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    found = {name: run_job(PipelineJob(folder, **TRAIN)) for name, folder in models.items()}
    shut_down()
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(
    pipelines: Results, alone: dict[str, dict[str, Any]], case: str
) -> None:
    expected = alone[CASES[case][0]]
    for rank in pipelines[case]:
        check_trained(rank, expected)
    check_tensors(pipelines[case], expected)


def check_trained(rank: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(rank["trajectory"], expected["trajectory"], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4, rel=1e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-3, abs=1e-4)
    for one, other in zip(rank["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def check_tensors(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    gathered = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}
    assert gathered.keys() == expected["tensors"].keys()
    for name, tensor in gathered.items():
        np.testing.assert_allclose(tensor, expected["tensors"][name], atol=2e-3, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_stages_send_their_own_layers_under_unchanged_names(
    pipelines: Results, alone: dict[str, dict[str, Any]], case: str
) -> None:
    counts = CASES[case][1].get("pipeline_layers", (2, 2))
    in_chunks = "pipeline_chunks" in CASES[case][1]
    names = [list(rank["tensors"]) for rank in pipelines[case]]
    found = [{name.split(".")[2] for name in own if ".layers." in name} for own in names]
    assert [len(layers) for layers in found] == list(counts)
    if in_chunks:
        assert found == [{"0", "2"}, {"1", "3"}]
    ours, theirs = [*names[0], *names[1]], list(alone[CASES[case][0]]["tensors"])
    assert (sorted(ours) if in_chunks else ours) == (sorted(theirs) if in_chunks else theirs)
    for rank, own in zip(pipelines[case], names, strict=True):
        assert [spec[0] for spec in rank["specs"] if spec[3] == rank["stage"]] == own


@pytest.mark.parametrize("case", MIXTURES)
def test_all_stages_know_the_experts_of_all_layers(
    pipelines: Results, alone: dict[str, dict[str, Any]], case: str
) -> None:
    for rank in pipelines[case]:
        for ours, theirs in zip(rank["experts"], alone["qwen3_moe"]["experts"], strict=True):
            assert ours.shape[1] == LAYERS
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", MIXTURES)
def test_stages_replay_the_experts_of_their_own_layers(
    pipelines: Results, alone: dict[str, dict[str, Any]], case: str
) -> None:
    expected = alone["qwen3_moe"]
    for rank in pipelines[case]:
        for ours, theirs, chosen in zip(rank["replayed"], expected["replayed"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
            assert np.abs(ours - chosen).max() > 0.1


def test_a_model_in_chunks_is_saved_whole(models: dict[str, Path], pipelines: Results) -> None:
    gathered = {name: tensor for rank in pipelines["chunks, tied"] for name, tensor in rank["tensors"].items()}
    saved: dict[str, np.ndarray] = {}
    for file in models["llama_tied"].with_name(SAVED).glob("*.safetensors"):
        saved |= load_file(file)
    assert saved.keys() == gathered.keys()
    for name, tensor in gathered.items():
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


def test_four_stages_of_two_chunks(tmp_path: Path) -> None:
    """Stages have other neighbours before and after them; 5 micro-batches are not a multiple of them."""
    model = make_model(tmp_path / "deep", "qwen3", num_hidden_layers=8)
    train = TRAIN | {"steps": 2}
    job = PipelineJob(model, {"pipeline_parallel": 4, **CHUNKS}, one_schedule=True, **train | {"pieces": 7})
    (ranks,) = run_world([job], 4, tmp_path / "world")
    expected = run_job(PipelineJob(model, **train))
    shut_down()
    for rank in ranks:
        check_trained(rank, expected)
    check_tensors(ranks, expected)


def test_layers_that_do_not_add_up_are_refused(models: dict[str, Path]) -> None:
    job = Job(models["llama_tied"], {"pipeline_parallel": 2, "pipeline_layers": (3, 2)})
    with pytest.raises(ModelError, match=r"pipeline_layers is \[3, 2\]: it must add up to the model's 4 layers"):
        make_learner(job, 2)
    job = Job(models["llama_tied"], {"pipeline_parallel": 2, "pipeline_chunks": 3})
    with pytest.raises(ModelError, match="pipeline_chunks is 3: it must divide the 2 layers of a pipeline stage; numb"):
        make_learner(job, 2)
