"""Checkpoints of two GPUs in bf16, loaded by two GPUs arranged as they were or otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.trainer.checkpoints.checkpoint_worlds import CheckpointJob
from tests.integration.trainer.trainer_worlds import make_model, run_named

pytestmark = pytest.mark.gpu(2)

BF16: dict[str, Any] = {"dtype": "bfloat16"}
TP2, PP2 = {**BF16, "tensor_parallel": 2}, {**BF16, "pipeline_parallel": 2}
OFFLOADED: dict[str, Any] = {**BF16, "optimizer": {"cpu_offload": True}}


def test_weights_come_back_and_training_goes_on(tmp_path: Path, facts: Callable[[str, object], None]) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    jobs = {
        "TP2": CheckpointJob(model, TP2, save=tmp_path / "TP2"),
        "DP2": CheckpointJob(model, BF16, save=tmp_path / "DP2"),
        "offloaded": CheckpointJob(model, OFFLOADED, save=tmp_path / "offloaded"),
        "TP2 again": CheckpointJob(model, TP2, load=tmp_path / "TP2", same_layout=True),
        "DP2 again": CheckpointJob(model, BF16, load=tmp_path / "DP2", same_layout=True),
        "offloaded again": CheckpointJob(model, OFFLOADED, load=tmp_path / "offloaded", same_layout=True),
        "TP2 to PP2": CheckpointJob(model, PP2, load=tmp_path / "TP2"),
    }
    found = run_named(jobs, 2, tmp_path / "world")
    facts("stall_seconds", round(max(rank["stall"] for rank in found["DP2"]), 3))
    for before, after in (
        ("TP2", "TP2 again"),
        ("DP2", "DP2 again"),
        ("offloaded", "offloaded again"),
        ("TP2", "TP2 to PP2"),
    ):
        saved = {name: tensor for rank in found[before] for name, tensor in rank["at_save"].items()}
        loaded = {name: tensor for rank in found[after] for name, tensor in rank["at_load"].items()}
        assert saved.keys() == loaded.keys(), after
        assert all(np.array_equal(loaded[name], tensor) for name, tensor in saved.items()), after
        if after.endswith("again"):
            assert [rank["drawn"] for rank in found[after]] == [rank["drawn"] for rank in found[before]]
        for one, other in zip(found[before], found[after], strict=True):
            np.testing.assert_allclose(other["trajectory"], one["trajectory"], rtol=0.05, err_msg=after)
