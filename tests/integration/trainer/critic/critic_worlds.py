"""Worlds of two processes that save and load checkpoints of policy and critic."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, make_samples, micro_batches

COLUMNS = ("rollout_logprobs", "advantages", "values", "returns")


@dataclass(frozen=True)
class CheckpointJob:
    """Two steps, a checkpoint, and two more steps; or the checkpoint and the last two."""

    model: Path
    folder: Path
    """The checkpoint."""
    parallel: dict[str, int] = field(default_factory=dict)
    load: bool = False
    same_layout: bool = True


def valued_samples(seed: int = 0) -> list[Any]:
    """Samples with values and returns."""
    random = np.random.default_rng(seed + 100)
    return [
        replace(
            sample,
            columns={
                **sample.columns,
                "values": random.normal(0, 0.1, len(sample.tokens)).astype(np.float32),
                "returns": random.normal(0, 1, len(sample.tokens)).astype(np.float32),
            },
        )
        for sample in make_samples(seed=seed)
    ]


def train(learner: Any, steps: int, *, nap: bool = False) -> list[tuple[float, ...]]:
    """Steps on made-up samples; loss and gradient norm of policy and critic in each."""
    found = []
    for _ in range(steps):
        batches = micro_batches(valued_samples(learner.step), 60, learner.world.dp_size, COLUMNS)
        learner.accumulate(batches[learner.world.dp_rank])
        if nap:
            learner.offload()
            learner.onload()
        stats = learner.finish(20.0)
        found.append((stats.loss, stats.grad_norm, stats.metrics["value_loss"], stats.metrics["value_grad_norm"]))
    return found


def run_job(job: CheckpointJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    import torch.distributed as dist

    learner = make_learner(Job(job.model, job.parallel, {"name": "ppo"}), ranks)
    if job.load:
        learner.restore(job.folder, 2, same_layout=job.same_layout)
    else:
        train(learner, 2)
        if learner.world.rank == 0:
            job.folder.mkdir()
        dist.barrier()
        snapshot = learner.snapshot(job.folder)
        snapshot.write()
        dist.barrier()
    numbers = train(learner, 2)
    result = {"numbers": numbers, "checksum": learner.checksum(), "tensors": copied(learner)}
    from tests.kit.megatron_world import leave_layout

    leave_layout()
    return result
