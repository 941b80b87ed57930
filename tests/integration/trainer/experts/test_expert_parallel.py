"""Two gloo ranks that share the experts, against the formula, under loads that leave experts or whole ranks idle."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.trainer.experts.expert_ranks import ExpertJob, tensors
from tests.integration.trainer.trainer_worlds import run_named
from tests.kit.expert_formulas import LOADS, mixture

JOBS = {load: ExpertJob(load, (20, 33)) for load in LOADS}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_named(JOBS, 2, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("load", LOADS)  # under "one expert", one rank gets no rows at all
def test_output_and_gradients_equal_the_formula(found: dict[str, list[dict[str, Any]]], load: str) -> None:
    given = [tensors(JOBS[load], rank) for rank in (0, 1)]
    fc1, fc2 = (given[0][name].double().requires_grad_() for name in ("fc1", "fc2"))
    expected: list[dict[str, Any]] = []
    for one in given:
        x, weights = one["x"].double().requires_grad_(), one["weights"].double().requires_grad_()
        output = mixture(x, weights, one["experts"], fc1, fc2)
        output.backward(one["grad"].double())
        expected.append({"output": output, "x": x.grad, "weights": weights.grad})
    half = len(fc1) // 2
    for rank, ours in enumerate(found[load]):
        here = slice(rank * half, (rank + 1) * half)
        matrices = {"fc1": fc1.grad[here], "fc2": fc2.grad[here]}
        for name, tensor in (expected[rank] | matrices).items():
            np.testing.assert_allclose(ours[name], tensor.detach(), rtol=1e-4, atol=1e-4, err_msg=name)
    assert torch.isfinite(fc1.grad).all()
