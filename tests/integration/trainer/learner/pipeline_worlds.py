"""Worlds of pipelines: jobs of `trainer_worlds`, and the experts that a pipeline records and replays."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.integration.trainer import trainer_worlds
from tests.integration.trainer.trainer_worlds import EXPERTS, Job, make_learner, make_samples

RECORDING = {"routing_replay": "trainer", "groups_per_step": 2, "mini_batches": 2}


@dataclass(frozen=True)
class PipelineJob(Job):
    """A job of which `run_job` here finds more."""


def run_job(job: PipelineJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank; of a mixture of experts also return what its routers choose, by micro-batch.

    And the log-probs with experts that they don't choose.
    """
    result = trainer_worlds.run_job(job, ranks)
    if "moe" in job.model.name:
        from services.trainer.batch.micro_batch import pack
        from tests.kit.megatron_world import leave_layout

        samples = make_samples(job.samples)
        learner = make_learner(replace(job, parallel={**job.parallel, **RECORDING}), ranks)
        batches = [pack(samples[:3]), pack(samples[3:])]
        result["experts"] = chosen = learner.log_probs_and_experts(batches)[1]
        others = [(experts.astype(np.int16) + 1) % EXPERTS["num_experts"] for experts in chosen]
        given = [replace(batch, experts=experts) for batch, experts in zip(batches, others, strict=True)]
        result["replayed"] = learner.log_probs(given)
        leave_layout()
    return result
