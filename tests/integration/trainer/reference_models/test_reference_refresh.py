"""A reference service that takes over the policy's weights: the numbers of one in the trainer's ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.board import REFERENCE_WEIGHTS
from services.trainer.batch.step_plan import read_committed
from services.trainer.loop.checkpoint_folders import weights_path
from tests.integration.trainer.reference_models.reference_kit import (
    AS_SERVICE,
    REFRESHED,
    STEPS,
    Reference,
    config_of,
    prepare_run,
)
from tests.integration.trainer.trainer_worlds import make_model
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down

pytestmark = pytest.mark.usefixtures("alone")


def run_with_service(job: RunJob) -> dict[str, Any]:
    """Train beside a reference that scores all groups with the initial weights, and is killed.

    The next one comes after the first refresh.
    """
    reference = Reference(job)

    def on_version(version: int) -> None:
        if version == 2:
            reference.start()

    try:
        reference.coordinator.wait(lambda: reference.coordinator.status.done_groups == STEPS)
        reference.kill()
        trained = run_job(replace(job, on_version=on_version))
    finally:
        reference.close()
    shut_down()
    return trained


def columns_of(job: RunJob, trained: dict[str, Any], name: str) -> list[Any]:
    """A column of all groups in the steps' files."""
    files = [read_committed(job.folder, entry.step, entry.plan) for entry in trained["ledger"]]
    return [columns[name] for file in files for columns in file.groups.values()]


@pytest.mark.slow
def test_the_numbers_are_those_of_a_reference_in_the_trainer_though_it_is_killed(
    redis_url: str, tmp_path: Path
) -> None:
    """The replica that follows begins with the weights of step 2, and takes over those of step 4."""
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    job = prepare_run(redis_url, 1, config_of(model, REFRESHED), tmp_path / "inside")
    inside = run_job(job)
    shut_down()
    expected = [entry.metrics["kl"] for entry in inside["ledger"]]
    assert [value < 1e-9 for value in expected] == [True, False, True, False, True]
    assert not weights_path(job.folder, "").exists()

    job = prepare_run(redis_url, 2, config_of(model, AS_SERVICE), tmp_path / "service")
    served = run_with_service(job)
    ledger = served["ledger"]
    assert [entry.metrics["kl"] for entry in ledger] == pytest.approx(expected, rel=1e-4, abs=1e-9)
    for name, tensor in inside["tensors"].items():
        np.testing.assert_allclose(served["tensors"][name], tensor, atol=1e-5, err_msg=name)

    # The ledger and the groups' columns say which weights scored a step's groups.
    names = ["", "", "step-000002.1", "step-000002.1", "step-000004.1"]
    assert [entry.plan.get("reference", "") for entry in ledger] == names
    assert [entry.plan.get("refreshed") for entry in ledger] == [None, ["reference"], None, ["reference"], None]
    assert columns_of(job, served, REFERENCE_WEIGHTS) == names
    # What waited at a refresh was scored again: three groups after step 2. After step 4 that is the last group, unless
    # the reference had not come to it by then: then it scored it once, with the newest weights.
    rescored = [entry.metrics["rescored_groups"] for entry in ledger]
    assert (rescored[:2], rescored[2] >= 3, rescored[3]) == ([0, 0], True, 0)
    assert sorted(path.name for path in weights_path(job.folder, "").iterdir()) == sorted(set(names) - {""})

    # A trainer that repeats all steps needs no reference, bit for bit.
    again = run_job(job)
    assert all(np.array_equal(again["tensors"][name], tensor) for name, tensor in served["tensors"].items())
    shut_down()
