"""Worlds of two processes whose reference takes over the policy's weights: whole runs, and log-probs of both models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.trainer.trainer_worlds import Job, make_learner, make_samples

WITH_KL = {"kl_coef": 0.3, "kl_estimator": "k2"}
STEPS, REFRESHED_AFTER = 3, 2


@dataclass(frozen=True)
class RefreshJob:
    """Steps on the same samples; after one of them the reference takes over the weights, which are exported, too."""

    model: Path
    parallel: dict[str, int]
    folder: Path
    """Where they are exported to."""


def run_job(job: RefreshJob, ranks: int) -> dict[str, Any]:
    """Run one job on this rank. Returns the log-probs [T] of policy and reference after each step."""
    from services.trainer.batch.micro_batch import pack
    from tests.kit.megatron_world import leave_layout

    learner, batch = make_learner(Job(job.model, dict(job.parallel), WITH_KL), ranks), pack(make_samples())
    policy, reference = [], []
    for step in range(1, STEPS + 1):
        learner.accumulate([batch])
        learner.update(20.0)
        learner.end_step(("reference",) if step == REFRESHED_AFTER else ())
        policy += learner.log_probs([batch])
        reference += [columns["ref_logprobs"] for columns in learner.frozen_columns([batch])]
        if step == REFRESHED_AFTER:
            learner.save_hf(job.folder)
    leave_layout()
    return {"policy": policy, "reference": reference}
