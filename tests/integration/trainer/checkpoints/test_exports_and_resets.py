"""Models exported during a run, and moments that start anew or aren't saved: also after a trainer's death."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from relaxd.run_folder import checkpoint_path, model_path
from tests.integration.trainer.checkpoints.checkpoint_kit import (
    config_of,
    kill_and_wait,
    train_to,
    wait_for_checkpoint,
    weights,
)
from tests.integration.trainer.service_kit import export, trainer_service

LR = 1e-3  # that of `make_config`


def changes(before: Path, after: Path) -> NDArray[Any]:
    """Changes of an update, of those weights that it changed."""
    first, second = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    found = np.concatenate([np.abs(second[name] - first[name]).ravel() for name in first])
    return found[found > 0]


@pytest.mark.slow
def test_models_are_exported_and_moments_reset_also_where_a_trainer_repeats_steps(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    checkpoint = {"export_every": 2, "keep_step_files": "always"}
    config = config_of(tiny_qwen3, every=3, reset_moments_every=3, reset_moments_after=[1], checkpoint=checkpoint)
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        train_to(coordinator, feeder, 1, 1, 1)
        first = export(process, "first")
        train_to(coordinator, feeder, 1, 2, 2)
        second = export(process, "second")
        assert weights(model_path(tmp_path, 2)) == weights(second)
        # AdamW's first update changes each weight by the learning rate, whatever its gradient; later ones don't.
        assert np.median(changes(first, second)) == pytest.approx(LR, rel=1e-2)
        train_to(coordinator, feeder, 1, 3, 3)
        third = export(process, "third")
        assert np.median(changes(second, third)) != pytest.approx(LR, rel=1e-2)
        wait_for_checkpoint(tmp_path, 3)
        train_to(coordinator, feeder, 1, 4, 5)
        fourth = model_path(tmp_path, 4)
        assert np.median(changes(third, fourth)) == pytest.approx(LR, rel=1e-2)
        before = weights(fourth)
        last = weights(export(process, "last"))

        # The next trainer loads step 3 and repeats the others; what had been missing is exported again.
        for path in fourth.iterdir():
            path.unlink()
        fourth.rmdir()
        kill_and_wait(coordinator, process, 2, 5)
        assert weights(export(process, "again")) == last
        assert weights(fourth) == before
        assert sorted(path.name for path in fourth.parent.iterdir()) == ["step-000002", "step-000004"]


@pytest.mark.slow
def test_a_checkpoint_without_moments_has_a_third_of_the_bytes_and_starts_adamw_anew(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3, every=2, checkpoint={"moments": False})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        train_to(coordinator, feeder, 1, 1, 2)
        wait_for_checkpoint(tmp_path, 2)
        stored = sum(path.stat().st_size for path in checkpoint_path(tmp_path, 2).glob("rank-*"))
        exported = export(process, "second") / "model.safetensors"
        weight_bytes = sum(array.nbytes for array in load_file(exported).values())
        assert weight_bytes <= stored < 1.2 * weight_bytes + 100_000  # float32 both, and the random generators

        kill_and_wait(coordinator, process, 2, 2)
        before = export(process, "before")
        assert weights(before) == exported.read_bytes()
        train_to(coordinator, feeder, 2, 3, 3)
        assert np.median(changes(before, export(process, "third"))) == pytest.approx(LR, rel=1e-2)
