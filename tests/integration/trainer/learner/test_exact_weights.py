"""Main weights of a bfloat16 model have what its float32 folder says, not what bfloat16 leaves of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learner.optimizer import main_weights
from tests.integration.trainer.trainer_worlds import Job, make_learner, make_model
from tests.kit.megatron_world import shut_down

BFLOAT16 = {"dtype": "bfloat16"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "bfloat16": BFLOAT16,
    "offloaded": BFLOAT16 | {"optimizer": {"cpu_offload": True}},
    "float8 moments": BFLOAT16 | {"optimizer": {"moments": "float8"}},
}


@pytest.fixture(autouse=True)
def worlds() -> Iterator[None]:
    shut_down()
    yield
    shut_down()


def parameters(learner: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner._policy.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_weights_begin_as_the_folder_has_them(tmp_path: Path, layout: str) -> None:
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    exact = parameters(make_learner(Job(folder)))
    shut_down()
    learner = make_learner(Job(folder, LAYOUTS[layout]))
    names = {parameter: name for name, parameter in learner._policy.named_parameters()}
    compared = 0
    for one in learner._optimizer.chained_optimizers:
        for parameter in one.model_param_group_index_map:
            wanted, place = exact[names[parameter]], one._get_model_param_range_map(parameter)["param"]
            assert torch.equal(parameter, wanted.bfloat16())
            main = main_weights(one, parameter).view(-1)
            torch.testing.assert_close(main, wanted.view(-1)[place.start : place.end], rtol=2**-16, atol=1e-9)
            compared += main.numel()
    assert compared == sum(one.numel() for one in exact.values())
    assert not any(hasattr(parameter, "rounding") for parameter in learner._policy.parameters())
