"""Activations on the host: the same gradients to the bit, memory within its limit, all of it free after a step."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.batch.micro_batch import pack
from services.trainer.transformer.activation_memory import BLOCK_BYTES, ActivationOffload, Recompute, unpack
from tests.integration.trainer.trainer_worlds import Job, make_learner, make_model, make_samples
from tests.kit.megatron_world import leave_layout, shut_down


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def gradients_without(model: Path) -> dict[str, Tensor]:
    shut_down()  # what tests before this file have left
    return gradients(model, {})[0]


def gradients(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], ActivationOffload | None]:
    learner = make_learner(Job(folder, settings))
    learner.accumulate([pack(make_samples())] * 2)
    found = {name: parameter.main_grad.clone() for name, parameter in learner._policy.named_parameters()}
    learner.discard()
    offload: ActivationOffload | None = learner._forward._offload
    leave_layout()
    return found, offload


def used_bytes(offload: ActivationOffload) -> int:
    """Bytes that hold activations now, in whole blocks."""
    return offload.held_bytes - len(offload._pool._free) * BLOCK_BYTES


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("blocks", [64, 3])
def test_gradients_are_the_same_to_the_bit(
    model: Path, gradients_without: dict[str, Tensor], recompute: str, blocks: int
) -> None:
    limit = blocks * BLOCK_BYTES + 1
    found, offload = gradients(model, {"recompute": recompute, "activation_offload_bytes": limit})
    assert all(torch.equal(found[name], tensor) for name, tensor in gradients_without.items())
    gc.collect()
    assert offload is not None
    assert offload.moved_bytes > 0
    assert used_bytes(offload) == 0
    assert 0 < offload.held_bytes <= limit


def test_what_is_saved_is_on_the_host_once_and_is_freed_after_its_last_use() -> None:
    offload = ActivationOffload(torch.device("cpu"), 4 * BLOCK_BYTES, ahead=1)
    x = torch.randn(1000, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(1000))
    y = x * 2
    with offload.saving([weight]):
        first = (y.view(10, 100) * y.view(10, 100)).sum()  # one storage, saved twice
        with Recompute(True, offload.pack) as recompute:
            squared = recompute(torch.square, y)
            second = (squared.sin() * weight).sum()
    sines = used_bytes(offload) // BLOCK_BYTES - 1
    assert (offload.moved_bytes, sines) == (2 * 4000, 1)
    with torch.no_grad():
        y.zero_()  # a copy was saved
    (first + second).backward()
    exact = x.detach() * 2
    torch.testing.assert_close(x.grad, 2 * (2 * exact + weight.detach() * (exact**2).cos() * 2 * exact))
    del first, second, squared, y
    assert used_bytes(offload) == 0


def test_what_has_no_room_and_what_is_to_stay_are_saved_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    offload = ActivationOffload(torch.device("cpu"), 2 * BLOCK_BYTES, ahead=1)
    large, small, staying = torch.zeros(BLOCK_BYTES), torch.ones(3), torch.ones(3)
    with offload.saving([staying]):
        assert offload.pack(large) is large  # four bytes an element
        assert offload.pack(staying) is staying
        saved = offload.pack(small)
    assert saved is not small
    assert torch.equal(unpack(saved), small)
    assert "further activations stay on the GPU" in caplog.text
