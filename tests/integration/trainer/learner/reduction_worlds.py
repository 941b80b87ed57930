"""Worlds that train with and without overlapped reduction, in buckets as small as their models."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.integration.trainer import trainer_worlds, training_worlds
from tests.integration.trainer.critic.critic_worlds import COLUMNS, valued_samples
from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, micro_batches
from tests.integration.trainer.training_worlds import RunJob

BUCKET = 20_000
"""Parameters of a bucket, of which the models have 100 000 and more."""


@dataclass(frozen=True)
class ReductionJob:
    """Two steps of two updates on made-up samples."""

    model: Path
    overlap: bool
    parallel: dict[str, Any] = field(default_factory=dict)
    bucket: int = BUCKET
    samples: int = 7
    """Samples of an update. One leaves the second data-parallel rank without any."""
    calls: int = 3
    """Calls of `accumulate` in an update."""
    announced: bool = True
    """Whether the last of them says so."""
    nap: bool = False
    """Move everything to the host's memory and back before each update, while gradients may be on their way."""
    drop: bool = False
    """Drop the gradients of each update once, after all of its micro-batches, and accumulate them again."""


def run_job(job: ReductionJob | RunJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    from services.trainer.learner import data_parallel

    bucket = BUCKET if isinstance(job, RunJob) else job.bucket
    with mock.patch.object(data_parallel, "BUCKET_PARAMETERS", bucket):
        return training_worlds.run_job(job, ranks) if isinstance(job, RunJob) else _train(job, ranks)


def _train(job: ReductionJob, ranks: int) -> dict[str, Any]:
    from services.trainer.megatron.parallel import leave_layout

    # The norm is rounded otherwise where buckets are others, so that clipping would change the last bits.
    parallel = {"overlap_grad_reduce": job.overlap, "optimizer": {"clip_grad": 0.0}, **job.parallel}
    learner = make_learner(Job(job.model, parallel, {"name": "ppo"}), ranks)
    models = [learner._model, learner._critic.model]
    result: dict[str, Any] = {
        "buckets": [len(m.bucket_groups) + len(m.expert_parallel_bucket_groups) for m in models],
        "early": [],
        "gradients": [],
        "numbers": [],
    }
    for update in range(4):
        for _ in range(1 + job.drop):
            learner.discard()
            _accumulate(learner, job, update)
        if job.nap:
            learner.offload()
            learner.onload()
        result["early"].append([0 if m.overlapped is None else m.overlapped.started_early for m in models])
        with mock.patch.object(learner, "_apply", wraps=learner._apply) as apply:
            apply.side_effect = lambda *arguments: result["gradients"].append(_shares(models)) or mock.DEFAULT
            stats = learner.update(20.0)
        result["numbers"].append((stats.loss, stats.grad_norm, *sorted(stats.metrics.items())))
        if update % 2:
            learner.end_step()
    result |= {"tensors": copied(learner), "checksum": learner.checksum()}
    leave_layout()
    return result


def _accumulate(learner: Any, job: ReductionJob, update: int) -> None:
    samples = valued_samples(update)[: job.samples]
    batches = micro_batches(samples, 48, learner.world.dp_size, COLUMNS)[learner.world.dp_rank]
    ends = np.linspace(0, len(batches), min(job.calls, len(batches)) + 1).astype(int)
    for begin, end in pairwise(ends):
        learner.accumulate(batches[begin:end], last=job.announced and end == len(batches))


def _shares(models: list[Any]) -> dict[str, np.ndarray]:
    """Reduced gradients of the elements that this rank updates, by parameter, elsewhere NaN."""
    import torch.distributed as dist

    found = {}
    for number, model in enumerate(models):
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
            size, rank = (
                group.intra_distributed_optimizer_instance_size,
                group.intra_distributed_optimizer_instance_rank,
            )
            for bucket in group.buckets:
                share = bucket.grad_data.numel() // size
                own = np.full(bucket.grad_data.numel(), np.nan, np.float32)
                kept = slice(rank * share, (rank + 1) * share)
                own[kept] = bucket.grad_data[kept].clone().numpy()  # a storage with an array can not be resized
                start = bucket.grad_data.storage_offset()
                for parameter in bucket.params_list:
                    begin = parameter.main_grad.storage_offset() - start
                    whose = f" of rank {dist.get_rank()}" if size == 1 else ""  # experts that no other rank has
                    found[f"{number} {names[parameter]}{whose}"] = own[begin : begin + parameter.numel()].copy()
    return found


if __name__ == "__main__":
    # Under its own name, or the pickled jobs would be of another class than __main__'s.
    from tests.integration.trainer.learner import reduction_worlds

    trainer_worlds.work(reduction_worlds.run_job)
