"""Worlds of two processes in which one rank's gradient becomes NaN."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, make_samples


@dataclass(frozen=True)
class NaNJob:
    """A step for each parameter of the last rank, with a NaN in that parameter's gradient on that rank alone."""

    model: Path
    parallel: dict[str, Any] = field(default_factory=dict)


def run_job(job: NaNJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    import torch.distributed as dist

    from services.trainer.batch.micro_batch import pack

    learner = make_learner(Job(job.model, job.parallel), ranks)
    batch = pack(make_samples())
    names = [[name for name, _ in learner._policy.named_parameters()]]
    dist.broadcast_object_list(names, ranks - 1)
    before, stats = copied(learner), []
    for name in names[0]:
        learner.accumulate([batch, batch])
        if learner.world.rank == ranks - 1:
            gradient = dict(learner._policy.named_parameters())[name].main_grad
            gradient.view(-1)[gradient.numel() // 2] = float("nan")
        stats.append(learner.finish(20.0))
    after_nan = copied(learner)
    learner.accumulate([batch, batch])
    result = {
        "names": names[0],
        "stats": stats,
        "before": before,
        "after_nan": after_nan,
        "good": learner.finish(20.0),
        "after_good": copied(learner),
    }
    from tests.kit.megatron_world import leave_layout

    leave_layout()
    return result
