"""Step files: everything comes back, and what is damaged or not committed is named."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.batch.step_plan import (
    StepFileError,
    read_committed,
    read_step_file,
    step_file_path,
    write_step_file,
)
from services.trainer.loop.checkpoint_folders import plan_sha256
from tests.kit.disks import full_disk
from tests.unit.trainer.batch.step_plans import PLAN

GROUPS: dict[str, dict[str, Any]] = {
    "a": {"tokens": np.arange(4, dtype=np.int32), "reward": np.array([0.1]), "prompt": {"text": "ä", "n": [1, None]}},
    "b/c": {"tokens": np.zeros(0, np.int32), "loss_mask": np.array([1, 0], np.uint8), "text": ["", "x"]},
    "not in the plan": {"tokens": np.ones(1)},
}


def test_columns_and_plan_come_back(tmp_path: Path) -> None:
    path = step_file_path(tmp_path, 2)
    write_step_file(path, PLAN, GROUPS)
    assert path == tmp_path / "steps" / "step-000002.safetensors"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    file = read_committed(tmp_path, 2, PLAN.to_json())
    assert file.plan == PLAN
    assert list(file.groups) == ["a", "b/c"]
    for group_id, columns in file.groups.items():
        assert columns.keys() == GROUPS[group_id].keys()
        for name, value in columns.items():
            expected = GROUPS[group_id][name]
            if isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(value, expected, strict=True)
            else:
                assert value == expected


def test_the_ledger_adds_what_became_of_the_updates(tmp_path: Path) -> None:
    write_step_file(step_file_path(tmp_path, 2), PLAN, GROUPS)
    committed = replace(PLAN, skipped_updates=(0,))
    assert read_committed(tmp_path, 2, committed.to_json()).plan == committed
    # A ledger that is restored from step files lacks it, and a checkpoint of the step is as good as before.
    assert plan_sha256(committed.to_json()) == plan_sha256(PLAN.to_json())
    assert plan_sha256(replace(PLAN, term=2).to_json()) != plan_sha256(PLAN.to_json())


@pytest.mark.parametrize("most", [0, 500])
def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(tmp_path: Path, most: int) -> None:
    path = step_file_path(tmp_path, 2)
    with full_disk(most), pytest.raises(OSError, match="File too large") as refused:
        write_step_file(path, PLAN, GROUPS)
    assert refused.value.errno == errno.EFBIG
    assert not list(path.parent.iterdir())
    write_step_file(path, PLAN, GROUPS)
    with full_disk(most), pytest.raises(OSError, match="File too large"):
        write_step_file(path, replace(PLAN, term=2), GROUPS)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert read_step_file(path).plan == PLAN


def test_what_is_written_but_refused_its_name_leaves_nothing(tmp_path: Path) -> None:
    path = step_file_path(tmp_path, 2)
    path.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_step_file(path, PLAN, GROUPS)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_later_attempt_replaces_what_was_never_committed(tmp_path: Path) -> None:
    path = step_file_path(tmp_path, 2)
    write_step_file(path, PLAN, GROUPS)
    write_step_file(path, replace(PLAN, term=2), GROUPS)
    assert read_step_file(path).plan.term == 2
    with pytest.raises(StepFileError, match="another plan than the ledger has for step 2"):
        read_committed(tmp_path, 2, PLAN.to_json())


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = step_file_path(tmp_path, 2)
    with pytest.raises(StepFileError, match=r"step-000002.safetensors is missing"):
        read_step_file(path)
    write_step_file(path, PLAN, GROUPS)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole.replace(b"normalizer", b"normalizes")):
        path.write_bytes(damaged)
        with pytest.raises(StepFileError, match=r"step-000002.safetensors is damaged"):
            read_step_file(path)
    write_step_file(path, replace(PLAN, groups=("a",)), GROUPS)
    path.write_bytes(path.read_bytes().replace(rb"[\"a\"]", rb"[\"b\"]"))
    with pytest.raises(StepFileError, match="no columns of group b"):
        read_step_file(path)
