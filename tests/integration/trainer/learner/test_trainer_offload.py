"""Away and back: the learner goes on to the bit, and meanwhile its storages are empty."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.trainer.batch.micro_batch import pack
from services.trainer.learner import offload
from services.trainer.learner.learner import Learner
from services.trainer.learner.offload import Offload, state_tensors
from tests.integration.trainer.trainer_worlds import Job, make_learner, make_model, make_samples, run_world
from tests.kit.megatron_world import shut_down


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", tied=True)


@pytest.fixture
def worlds() -> Iterator[None]:
    yield
    shut_down()


def trained(
    model: Path, dtype: str, *, away: bool, offload: bool = True
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after three steps, with a nap between any two things that a learner does."""
    shut_down()
    learner = make_learner(Job(model, algorithm={"kl_coef": 0.1}, parallel={"dtype": dtype, "offload": offload}))
    losses = []
    for step in range(3):
        for part in (0, 1):
            if away:
                nap(learner)
            learner.accumulate([pack(make_samples(6, seed=10 * step + part))])
        if away:
            nap(learner)
        losses.append(learner.finish(12.0).loss)
    if away:
        nap(learner)
    return losses, {name: tensor.clone() for name, tensor in learner.iter_hf_tensors()}


def nap(learner: Learner) -> None:
    learner.offload()
    models = [learner._policy, *(model.module for model in learner._frozen)]
    tensors = [*state_tensors(models, learner._optimizer)]
    moves = learner._config.offload
    assert all((tensor.untyped_storage().nbytes() == 0) is moves for tensor in tensors if tensor.numel())
    if moves or not learner._accumulated:
        tensors = learner._model.gradient_tensors
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors if tensor.numel())
    learner.onload()


@pytest.mark.parametrize(("dtype", "offload"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_a_learner_goes_on_to_the_bit(model: Path, worlds: None, dtype: str, offload: bool) -> None:
    losses, weights = trained(model, dtype, away=False)
    losses_of_napper, weights_of_napper = trained(model, dtype, away=True, offload=offload)
    assert losses == losses_of_napper
    assert weights.keys() == weights_of_napper.keys()
    assert all(torch.equal(weights[name], weights_of_napper[name]) for name in weights)


@pytest.mark.slow
def test_every_pipeline_stage_keeps_its_gradients(model: Path, tmp_path: Path) -> None:
    """Also those that know nothing of the loss."""
    cut = {"pipeline_parallel": 2}
    jobs = [Job(model, parallel=dict(cut), steps=3, pieces=4, nap=nap) for nap in (False, True)]
    plain, napped = run_world(jobs, 2, tmp_path / "world")
    assert len(plain[0]["trajectory"]) == 3
    for one, other in zip(plain, napped, strict=True):
        assert one["trajectory"] == other["trajectory"]


def test_a_checkpoint_is_the_same_after_a_nap(model: Path, worlds: None, tmp_path: Path) -> None:
    learner = make_learner(Job(model))
    for _ in range(2):
        learner.accumulate([pack(make_samples(6))])
        learner.update(6.0)
    learner.end_step()
    nap(learner)
    (tmp_path / "checkpoint").mkdir()
    snapshot = learner.snapshot(tmp_path / "checkpoint")
    snapshot.write()
    checksum = learner.checksum()
    learner.accumulate([pack(make_samples(6, seed=3))])
    learner.finish(6.0)
    nap(learner)
    learner.restore(tmp_path / "checkpoint", 1, same_layout=True)
    assert (learner.step, learner.optimizer_steps) == (1, 2)
    assert learner.checksum() == checksum


def test_storages_larger_than_a_chunk_and_views_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 4096)
    generator = np.random.default_rng(0)
    whole = torch.from_numpy(generator.standard_normal(5000)).clone()
    view, other, zeros = whole[100:200], torch.arange(7), torch.zeros(1000)
    before = whole.clone(), view.clone(), other.clone()
    mover = Offload(torch.device("cpu"))
    mover.offload([view, whole, other, torch.empty(0)], zeros=[zeros])
    assert mover.away
    assert whole.untyped_storage().nbytes() == zeros.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="already"):
        mover.offload([other])
    mover.onload()
    assert all(torch.equal(*pair) for pair in zip(before, (whole, view, other), strict=True))
    assert zeros.shape == (1000,)
    assert not zeros.any()
    whole[150] = 7.0
    assert view[50] == 7.0  # still the same memory
