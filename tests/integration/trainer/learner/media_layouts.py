"""Layouts of two ranks for models with towers, and a check that they train as one process does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.trainer import trainer_worlds
from tests.integration.trainer.learner.image_worlds import Job, check_tensors, run_job
from tests.integration.trainer.trainer_worlds import EP2, PP2, TP2, run_world

ALL = {"freeze": []}
"""Settings that train the towers, too."""
LAYOUTS: dict[str, dict[str, Any]] = {
    **trainer_worlds.LAYOUTS,
    "TP2 recomputed": TP2 | {"recompute": "full"},
    "TP2 selective": TP2 | {"recompute": "selective"},
    "PP2 of 3 and 1": PP2 | {"pipeline_layers": [3, 1]},
    "DP2 overlapped": {"overlap_grad_reduce": True},
    "DP2 sharded": {"shard_gradients": True},
    "EP2": EP2,
    "TP2 EP2": TP2 | EP2,
}


def check_layouts(layouts: Mapping[Path, tuple[str, ...]], folder: Path) -> None:
    """Compare two steps on two ranks with those of one process. `layouts`: names in LAYOUTS, by model."""
    jobs = [(name, Job(model, ALL | LAYOUTS[name], steps=2)) for model, names in layouts.items() for name in names]
    alone = {model: run_job(Job(model, ALL, steps=2)) for model in layouts}
    results = run_world([job for _, job in jobs], 2, folder)
    for (name, job), ranks in zip(jobs, results, strict=True):
        one, way = alone[job.model], f"{name} of {job.model.name}"
        for rank in ranks:
            np.testing.assert_allclose(rank["logprobs"], one["logprobs"], atol=1e-5, err_msg=way)
            for ours, theirs in zip(rank["trajectory"], one["trajectory"], strict=True):
                assert ours.loss == pytest.approx(theirs.loss, abs=1e-4, rel=1e-4), way
                assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4), way
        check_tensors(ranks, one, way)
