"""Rank 0's commands are executed by all ranks, in one world of two processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.trainer.service.commanded_worlds import CommandJob
from tests.integration.trainer.trainer_worlds import make_model, run_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def world(folder: Path) -> list[dict[str, Any]]:
    """The results of both ranks."""
    job = CommandJob(make_model(folder / "model", "qwen3"), folder)
    return run_world([job], 2, folder / "ranks")[0]


def test_all_ranks_do_what_rank_0_does(world: list[dict[str, Any]], folder: Path) -> None:
    assert [rank["step"] for rank in world] == [1, 1], "both have loaded the checkpoint of step 1"
    assert world[0]["steps"] == [1, 2]
    at_1, saved, at_2, restored = world[0]["checksums"]
    assert at_1 == saved == restored != at_2
    assert world[0]["exported"] == 1, "both go on after a checkpoint's end that could not be written"
    assert world[0]["refused"].startswith("rank 1: FileExistsError")
    exported = load_file(folder / "export" / "model.safetensors")
    assert exported.keys() == world[0]["tensors"].keys()
    for name, tensor in world[0]["tensors"].items():
        assert np.array_equal(exported[name], tensor), name


def test_moves_report_the_memory_of_all_ranks(world: list[dict[str, Any]]) -> None:
    assert all(count > 200e6 for count in world[0]["memory"]), "two processes that hold torch"
