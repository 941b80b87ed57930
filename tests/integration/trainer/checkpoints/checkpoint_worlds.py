"""Worlds of real processes that train, save, and go on from what was saved, perhaps arranged otherwise.

A process costs seconds of imports, so one spawn does a list of jobs, one after the other.
"""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.trainer.trainer_worlds import Job, copied, make_learner, make_samples, micro_batches


@dataclass(frozen=True)
class CheckpointJob:
    """Start from the model or from a checkpoint, train two steps, save, train two more."""

    model: Path
    parallel: dict[str, int] = field(default_factory=dict)
    load: Path | None = None
    """Start from here, at step 2, and only do the last two steps."""
    same_layout: bool = False
    save: Path | None = None


def train(learner: Any, steps: int) -> list[tuple[float, float]]:
    """Steps on the same samples; loss and gradient norm of each."""
    batches = micro_batches(make_samples(), 60, learner.world.dp_size)[learner.world.dp_rank]
    found = []
    for _ in range(steps):
        learner.accumulate(batches)
        stats = learner.finish(20.0)
        found.append((stats.loss, stats.grad_norm))
    return found


def drawn() -> list[float]:
    """What this process's generators give next, all of them."""
    import torch

    return [float(torch.rand(())), float(np.random.random()), random.random()]


def optimizer_state(learner: Any) -> dict[str, tuple[int, np.ndarray]]:
    """What this rank's optimizers hold of each parameter, as Megatron says: main weights and moments.

    Returns:
        Place of the first element among the parameter's, and the elements, by the names of parameter and state.
    """
    import torch

    from services.trainer.learner.small_moments import float8_values

    names = {parameter: name for name, parameter in learner._policy.named_parameters()}
    found = {}
    for one in learner._optimizer.chained_optimizers:
        for parameter in one.model_param_group_index_map:
            start = one._get_model_param_range_map(parameter)["param"].start
            tensors = one._get_main_param_and_optimizer_states(parameter)
            if tensors["exp_avg"].dtype is torch.float8_e4m3fn:
                tensors["exp_avg"] = float8_values(tensors, start).read_float32()
            for state in ("param", "exp_avg", "exp_avg_sq"):
                values = tensors[state].detach().float().cpu().flatten().numpy().copy()
                found[f"{names[parameter]} {state}"] = start, values
    return found


def run_job(job: CheckpointJob, ranks: int = 1) -> dict[str, Any]:
    """Run one job on this rank."""
    import torch.distributed as dist

    learner = make_learner(Job(job.model, job.parallel), ranks)
    result: dict[str, Any] = {}
    if job.load is not None:
        drawn()
        learner.restore(job.load, 2, same_layout=job.same_layout)
        result["at_load"] = copied(learner)
        result["state_at_load"] = optimizer_state(learner)
    else:
        train(learner, 2)
        drawn()
    if job.save is not None:
        if learner.world.rank == 0:
            job.save.mkdir(parents=True)
        dist.barrier()
        began = time.monotonic()
        snapshot = learner.snapshot(job.save)
        result["stall"] = time.monotonic() - began
        result["at_save"] = copied(learner)
        result["state_at_save"] = optimizer_state(learner)
        result["memory"] = sum(memory.nbytes for memory in snapshot._kept.memory._tensors)
    result["drawn"] = drawn()
    result["trajectory"] = train(learner, 1)
    if job.save is not None:
        result["files"] = snapshot.write()  # only now: a snapshot holds what was, not what is
        dist.barrier()
    result["trajectory"] += train(learner, 1)
    result["step"] = learner.step
    result["tensors"] = copied(learner)
    from tests.kit.megatron_world import leave_layout

    leave_layout()
    return result
