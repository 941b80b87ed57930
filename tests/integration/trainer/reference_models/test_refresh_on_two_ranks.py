"""A reference that takes over the policy's weights, both divided among two tensor-parallel ranks."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from relaxd.board import REF_LOGPROBS
from services.trainer.batch.micro_batch import pack
from services.trainer.batch.step_plan import read_committed
from services.trainer.loop.checkpoint_folders import weights_path
from tests.integration.trainer.reference_models.reference_kit import (
    AS_SERVICE,
    REFRESHED,
    Reference,
    config_of,
    log_softmax,
    prepare_run,
)
from tests.integration.trainer.reference_models.refresh_worlds import REFRESHED_AFTER, RefreshJob
from tests.integration.trainer.trainer_worlds import TP2, make_model, make_samples, run_world
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", "qwen3", tied=True)


def groups_of(job: RunJob, trained: dict[str, Any]) -> list[dict[str, Any]]:
    """The columns of the only group of each step."""
    files = [read_committed(job.folder, entry.step, entry.plan) for entry in trained["ledger"]]
    return [columns for file in files for columns in file.groups.values()]


def log_probs_of(folder: Path, columns: dict[str, Any]) -> np.ndarray:
    """The log-probs of a group's answers by transformers, in float64."""
    model, found, begin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), [], 0
    prompt = torch.from_numpy(columns["prompt_tokens"].astype(np.int64))
    for length in columns["lengths"].tolist():
        answer = torch.from_numpy(columns["tokens"][begin : begin + length].astype(np.int64))
        begin += length
        with torch.no_grad():
            logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0].numpy())
    return np.concatenate(found)


@pytest.mark.slow
def test_a_refreshed_reference_gives_the_log_probs_of_the_policy_at_that_step(
    model: Path, redis_url: str, tmp_path: Path
) -> None:
    """In the trainer's ranks bit for bit; as a service, whose weights come from a folder, as transformers has them."""
    one_rank = run_job(prepare_run(redis_url, 1, config_of(model, REFRESHED), tmp_path / "one rank"))
    shut_down()
    expected = [entry.metrics["kl"] for entry in one_rank["ledger"]]
    exported = tmp_path / "exported"
    inside = prepare_run(redis_url, 2, config_of(model, REFRESHED, ranks=2, **TP2), tmp_path / "inside")
    served = prepare_run(redis_url, 3, config_of(model, AS_SERVICE | TP2, ranks=2, **TP2), tmp_path / "served")
    with contextlib.closing(Reference(served)) as reference:
        jobs = [RefreshJob(model, TP2, exported), inside, served]
        of_step, of_inside, of_served = run_world(jobs, 2, tmp_path / "ranks")
        assert reference.coordinator.status.gauges["ranks"] == 2

    samples, at = make_samples(), REFRESHED_AFTER - 1
    batch = pack(samples)
    trained = batch.loss_mask != 0
    exact = log_softmax(exported, samples).gather(-1, torch.from_numpy(batch.tokens[trained].astype(np.int64))[:, None])
    for rank in of_step:
        policy, own = rank["policy"], rank["reference"]
        np.testing.assert_allclose(policy[at][trained], exact[:, 0].numpy(), atol=1e-4)
        np.testing.assert_array_equal(own[at], policy[at])
        np.testing.assert_array_equal(own[at + 1], policy[at])
        for before in (own[at - 1], policy[at - 1], policy[at + 1]):
            assert np.abs(before - policy[at]).max() > 1e-2

    # In whole runs, too, policy and reference are the same in the first pass after a refresh.
    for ranks in (of_inside, of_served):
        differs = [entry.metrics["kl"] > 1e-9 for entry in ranks[0]["ledger"]]
        assert differs == [False, True, False, True, False]
    assert [entry.metrics["kl"] for entry in of_inside[0]["ledger"]] == pytest.approx(expected, rel=2e-3, abs=1e-9)
    names = ["", "", "step-000002.1", "step-000002.1", "step-000004.1"]
    assert [entry.plan.get("reference", "") for entry in of_served[0]["ledger"]] == names
    for name, columns in zip(names, groups_of(served, of_served[0]), strict=True):
        expected_columns = log_probs_of(weights_path(served.folder, name) if name else model, columns)
        np.testing.assert_allclose(columns[REF_LOGPROBS], expected_columns, atol=1e-4, err_msg=name)
