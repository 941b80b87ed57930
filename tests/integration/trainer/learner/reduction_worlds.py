"""Worlds that train with and without overlapped reduction or sharded gradients, in buckets as small as their models."""

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.integration.trainer import training_worlds
from tests.integration.trainer.critic.critic_worlds import COLUMNS, valued_samples
from tests.integration.trainer.service_kit import Feeder, make_config
from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, micro_batches
from tests.integration.trainer.training_worlds import RunJob

LENGTHS = (6, 9, 4, 11, 7, 5, 10, 8)
"""Tokens of the samples of a run's groups."""
BUCKET = 20_000
"""Parameters of a bucket, of which the models have 100 000 and more."""


@dataclass(frozen=True)
class ReductionJob:
    """Steps of two updates on made-up samples."""

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
    shard: bool = False
    """Whether gradients are sharded."""
    whole: bool = False
    """Whether each rank's samples of an update are one micro-batch."""
    poison: int = -1
    """Update in which the first rank's gradient becomes NaN; -1: none."""
    lacking: bool = False
    """Have a layer without a gradient in an update's second call."""
    updates: int = 4


@dataclass(frozen=True)
class ReductionRun(RunJob):
    """A run with small buckets."""


def run_of(model: Path, redis_url: str, number: int, folder: Path, **trainer: Any) -> ReductionRun:
    """A run of two steps of four groups, which all wait for it."""
    settings = {
        "ranks": 2,
        "groups_per_step": 4,
        "micro_batch_tokens": 32,
        "checkpoint": {"every": 0},
        "optimizer": {"lr": 1e-2, "clip_grad": 0.0},
        **trainer,
    }
    config = make_config(
        model, run={"steps": 2}, trainer=settings, algorithm={"old_logprobs": "current"}, board={"max_staleness": 8}
    )
    folder.mkdir(parents=True)
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, config)
    for length in LENGTHS:
        feeder.feed(1, 0, length=length)
    feeder.board.close()
    return ReductionRun(config, url, folder)


def merged(shares: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Gradients of a stage's ranks as one, each element from the rank that updates it."""
    whole: dict[str, np.ndarray] = {}
    for share in shares:
        for name, values in share.items():
            before = whole.setdefault(name, np.full_like(values, np.nan))
            both = ~np.isnan(before) & ~np.isnan(values)
            np.testing.assert_array_equal(before[both], values[both])
            whole[name] = np.where(np.isnan(before), values, before)
    assert not any(np.isnan(values).any() for values in whole.values())
    return whole


def run_job(job: ReductionJob | ReductionRun, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    from services.trainer.learner import data_parallel

    bucket = BUCKET if isinstance(job, RunJob) else job.bucket
    with mock.patch.object(data_parallel, "BUCKET_PARAMETERS", bucket):
        return training_worlds.run_job(job, ranks) if isinstance(job, RunJob) else _train(job, ranks)


def _train(job: ReductionJob, ranks: int) -> dict[str, Any]:
    from services.trainer.learner import learner as module
    from tests.kit.megatron_world import leave_layout

    # The norm is rounded otherwise where buckets are others, so that clipping would change the last bits.
    parallel = {"overlap_grad_reduce": job.overlap, "shard_gradients": job.shard, **job.parallel}
    parallel["optimizer"] = {"clip_grad": 0.0, **parallel.get("optimizer", {})}
    learner = make_learner(Job(job.model, parallel, {"name": "ppo"}), ranks)
    models = [learner._model, learner._critic.model]
    result: dict[str, Any] = {
        "buckets": [len(m.bucket_groups) + len(m.expert_parallel_bucket_groups) for m in models],
        "early": [],
        "late": [],
        "gradients": [],
        "numbers": [],
        "checksums": [],
        "skipped": [],
        "bytes": [],
        "peaks": [0] * len(models),
    }
    hooks: list[Any] = [m.sharded or m.overlapped for m in models]
    for index, reduction in enumerate(hooks):
        if reduction is not None:
            reduction.count = _measured(reduction.count, models[index], result["peaks"], index)
    for update in range(job.updates):
        for _ in range(1 + job.drop):
            learner.discard()
            _accumulate(learner, job, update)
        if job.nap:
            learner.offload()
            learner.onload()
        result["early"].append([0 if reduction is None else reduction.started_early for reduction in hooks])
        result["late"].append([m.sharded.started_late for m in models if m.sharded is not None])
        result["bytes"].append([gradient_bytes(m) for m in models])
        if update == job.poison and learner.world.rank == 0:
            models[0].gradient_tensors[0][:1] = float("nan")
        with mock.patch.object(module, "update_weights", wraps=module.update_weights) as apply:
            apply.side_effect = lambda *_, **__: result["gradients"].append(_shares(models)) or mock.DEFAULT
            stats = learner.update(20.0)
        result["checksums"].append(learner.checksum())
        result["skipped"].append(stats.skipped)
        result["numbers"].append((stats.loss, stats.grad_norm, *sorted(stats.metrics.items())))
        if update % 2:
            learner.end_step()
    result |= {"tensors": copied(learner), "checksum": learner.checksum()}
    if job.shard:
        result["refusals"] = _refusals(models[0])
    leave_layout()
    return result


def _accumulate(learner: Any, job: ReductionJob, update: int) -> None:
    samples = valued_samples(update)[: job.samples]
    batches = micro_batches(samples, 1024 if job.whole else 48, learner.world.dp_size, COLUMNS)[learner.world.dp_rank]
    ends = np.linspace(0, len(batches), min(job.calls, len(batches)) + 1).astype(int)
    last_norm = [parameter for name, parameter in learner._policy.named_parameters() if "pre_mlp_layernorm" in name][-1]
    for call, (begin, end) in enumerate(pairwise(ends)):
        last_norm.requires_grad_(not job.lacking or call != 1)
        learner.accumulate(batches[begin:end], last=job.announced and end == len(batches))


def _refusals(model: Any) -> list[str]:
    """Return the errors of more gradients than were announced, and of gradients after the reduction."""
    said = []
    with contextlib.suppress(RuntimeError), model.accumulating(1, last=True):
        for _ in range(2):
            for parameter in model.params_with_grad:
                try:
                    model.sharded.count(parameter)
                except RuntimeError as error:
                    said.append(str(error))
                    raise
    model.finish_grad_sync()
    try:
        model.sharded.begin(1)
    except RuntimeError as error:
        said.append(str(error))
    model.zero_grad_buffer()
    return said


def gradient_bytes(model: Any) -> int:
    """Bytes of the storages that a model's gradients are in."""
    tensors = [*model.gradient_tensors, *(p.main_grad for p in model.parameters() if hasattr(p, "main_grad"))]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _measured(count: Any, model: Any, peaks: list[int], index: int) -> Any:
    """Note the most bytes of a model's gradients, just before a bucket may be reduced."""

    def measure(parameter: Any) -> None:
        peaks[index] = max(peaks[index], gradient_bytes(model))
        count(parameter)

    return measure


def _shares(models: list[Any]) -> dict[str, np.ndarray]:
    """Reduced gradients of the elements that this rank updates, by parameter, elsewhere NaN."""
    from megatron.core import parallel_state

    found, place = {}, parallel_state.get_expert_model_parallel_rank()
    for number, model in enumerate(models):
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
            # Ranks that share the experts have others under the same names.
            experts = f" of experts {place}" if group in model.expert_parallel_bucket_groups else ""
            size, rank = (
                group.intra_distributed_optimizer_instance_size,
                group.intra_distributed_optimizer_instance_rank,
            )
            for bucket in group.buckets:
                share = bucket.grad_data.numel() // size
                own = np.full(bucket.grad_data.numel(), np.nan, np.float32)
                kept = slice(rank * share, (rank + 1) * share)
                own[kept] = _reduced(model, bucket, kept).clone().numpy()  # a storage with an array can not be resized
                for parameter in bucket.params_list:
                    begin = parameter.data.storage_offset() - bucket.param_data.storage_offset()
                    found[f"{number} {names[parameter]}{experts}"] = own[begin : begin + parameter.numel()].copy()
    return found


def _reduced(model: Any, bucket: Any, kept: slice) -> Any:
    """This rank's part of a bucket."""
    if model.sharded is None:
        return bucket.grad_data[kept]
    (own,) = (one for one in model.sharded.buckets if one.whole is bucket.grad_data)
    return own.shard
