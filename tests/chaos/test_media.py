"""The auditor of pictures finds what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.data.vision import read_vision
from relaxd.media import normalise_image
from relaxd.media.prompt_media import to_columns
from services.trainer.batch.step_file import step_file_path, write_step_file
from services.trainer.batch.step_plan import StepPlan
from tests.chaos.pictures import Pictures, audit_pictures
from tests.kit.vision import encoded, picture, write_vision_model

Columns = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model"))


def write_step(folder: Path, model: Path, change: Callable[[Columns], object] = lambda columns: None) -> None:
    """Write a step of two groups, of which one has other columns than it should."""
    rule, rows = read_vision(model).rule, Pictures()
    groups: dict[str, Columns] = {}
    for index in (1, 3):  # with one picture, with two
        row = rows[index]
        records, contents = to_columns([normalise_image(image, rule) for image in row.pop("images")])
        groups[str(index)] = {"prompt": row, "prompt_media": records, "media_contents": contents}
    change(groups["1"])
    write_step_file(step_file_path(folder, 1), StepPlan(1, 1, 0, tuple(groups), ()), groups)


def audit(folder: Path, model: Path, difference: float = 1e-6) -> list[str]:
    line = {"step": 1, "logprob_difference_max": difference}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2}) + "\n" + json.dumps(line) + "\n")
    return audit_pictures(folder, model)


def another(model: Path) -> Columns:
    """Return the columns of a group with another picture."""
    records, contents = to_columns([normalise_image(encoded(picture(64, 64, 2)), read_vision(model).rule)])
    return {"prompt_media": records, "media_contents": contents}


def test_nothing_is_said_of_the_right_pictures(tmp_path: Path, model: Path) -> None:
    write_step(tmp_path, model)
    assert audit(tmp_path, model) == []


def test_another_picture_is_found(tmp_path: Path, model: Path) -> None:
    write_step(tmp_path, model, lambda columns: columns.update(another(model)))
    (wrong,) = audit(tmp_path, model)
    assert wrong.startswith("step-000001.safetensors: group 1 has ['")


def test_another_picture_under_the_right_name_is_found(tmp_path: Path, model: Path) -> None:
    def swap(columns: Columns) -> None:
        contents = another(model)["media_contents"]
        columns["media_contents"] = contents
        columns["prompt_media"][0]["bytes"] = len(contents)

    write_step(tmp_path, model, swap)
    (wrong,) = audit(tmp_path, model)
    assert "under the name of" in wrong


def test_missing_bytes_and_weights_that_saw_something_else_are_found(tmp_path: Path, model: Path) -> None:
    write_step(tmp_path, model, lambda columns: columns.update(media_contents=np.zeros(5, np.uint8)))
    lacks, differs = audit(tmp_path, model, 0.2)
    assert "has 5 bytes of media, but prompt_media says" in lacks
    assert differs == "step 1: log-probs differ by 0.2"


def test_an_audit_without_anything_to_look_at_says_so(tmp_path: Path, model: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert audit_pictures(tmp_path, model) == ["0 step files, 0 differences of log-probs: there is nothing to audit"]
