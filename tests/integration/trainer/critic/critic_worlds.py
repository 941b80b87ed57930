"""Worlds of two processes that train a critic, too: whole runs, checkpoints, and large steps."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.trainer import trainer_worlds, training_worlds
from tests.integration.trainer.critic import assembly_worlds
from tests.integration.trainer.critic.assembly_worlds import AssemblyJob
from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, make_samples, micro_batches
from tests.integration.trainer.training_worlds import RunJob

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


def run_job(job: RunJob | CheckpointJob | AssemblyJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    if isinstance(job, RunJob):
        return training_worlds.run_job(job, ranks)
    if isinstance(job, AssemblyJob):
        return assembly_worlds.run_job(job)
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
    from services.trainer.megatron.world import leave_layout

    leave_layout()
    return result


if __name__ == "__main__":
    # Under its own name, or the pickled jobs would be of another class than __main__'s.
    from tests.integration.trainer.critic import critic_worlds

    trainer_worlds.work(critic_worlds.run_job)
