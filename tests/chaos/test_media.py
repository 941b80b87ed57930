"""The auditor of media finds what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.data.vision import normalise_shown, read_vision
from relaxd.media.kinds import NormalMedia
from relaxd.media.prompt_media import StoredMedia, to_columns, to_sequence_columns
from services.trainer.batch.step_plan import StepPlan, step_file_path, write_step_file
from tests.chaos.media import AllKinds, Item, audit_media, item, shown_in
from tests.kit.sounds import WITH_ALL, write_omni_model

DATA = WITH_ALL.model_copy(update={"max_video_tokens": 8})
PROMPT: list[Item] = [("image", 0), ("video", 1)]
Columns = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_omni_model(tmp_path_factory.mktemp("model"))


def normal(model: Path, items: list[Item]) -> list[NormalMedia]:
    return [normalise_shown(kind, item(kind, number), read_vision(model, DATA)) for kind, number in items]


def group(
    model: Path, prompt: list[Item], shown: list[list[Item]], change: Callable[[Columns], object] = lambda columns: None
) -> Columns:
    """Return the columns of a group whose sequences have shown these items, after a change."""
    records, contents = to_columns(normal(model, prompt))
    own = [list(map(StoredMedia.of, normal(model, items))) for items in shown]
    of_sequences = to_sequence_columns(own, [record["sha256"] for record in records])
    columns: Columns = {
        "prompt": {"answer": json.dumps(PROMPT)},
        "prompt_media": records,
        "media_contents": contents,
        "sequence_media": of_sequences[0],
        "sequence_contents": of_sequences[1],
        "shares_prompt": np.ones(len(shown), np.int32),
    }
    change(columns)
    return columns


def audit(folder: Path, model: Path, columns: Columns, difference: float = 1e-6) -> list[str]:
    write_step_file(step_file_path(folder, 1), StepPlan(1, 1, 0, ("g",), ()), {"g": columns})
    line = {"step": 1, "logprob_difference_max": difference}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2}) + "\n" + json.dumps(line) + "\n")
    return audit_media(folder, model, DATA)


def test_nothing_is_said_of_the_right_media_after_any_number_of_turns(tmp_path: Path, model: Path) -> None:
    first, second = shown_in(0)
    columns = group(model, PROMPT, [[], first, [*first, *second], [*PROMPT, *first]])
    columns["shares_prompt"][3] = 0
    assert audit(tmp_path, model, columns) == []
    without = {name: one for name, one in columns.items() if not name.startswith("sequence")}
    assert audit(tmp_path, model, without) == []


def test_other_media_are_found_in_prompts_and_conversations(tmp_path: Path, model: Path) -> None:
    first, second = shown_in(0)
    (wrong,) = audit(tmp_path, model, group(model, [PROMPT[0], ("video", 2)], [first]))
    assert wrong.startswith("step-000001.safetensors: group g has ['")
    assert "in its prompt, not ['" in wrong
    for shown in ([*second, *first], first[:1], [first[0], ("audio", 2)], [*first, *second[:1]]):
        (wrong,) = audit(tmp_path, model, group(model, PROMPT, [first, shown]))
        assert "in sequence 1, not ['" in wrong, shown


def test_other_media_under_the_right_name_are_found(tmp_path: Path, model: Path) -> None:
    def swap(columns: Columns) -> None:
        contents = to_columns(normal(model, [("audio", 5)]))[1]
        sizes = [one["bytes"] for one in columns["sequence_media"][0]]
        assert len(contents) == sizes[1], "an equally long sound"
        columns["sequence_contents"] = np.concatenate([columns["sequence_contents"][: sizes[0]], contents])

    (wrong,) = audit(tmp_path, model, group(model, PROMPT, [shown_in(0)[0]], swap))
    assert "other bytes under the name of" in wrong


def test_missing_bytes_and_weights_that_saw_something_else_are_found(tmp_path: Path, model: Path) -> None:
    columns = group(model, PROMPT, [], lambda columns: columns.update(media_contents=np.zeros(5, np.uint8)))
    lacks, differs = audit(tmp_path, model, columns, 0.2)
    assert "has 5 bytes of media, but prompt_media says" in lacks
    assert differs == "step 1: log-probs differ by 0.2"


def test_an_audit_without_anything_to_look_at_says_so(tmp_path: Path, model: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    expected = ["0 step files, 0 differences of log-probs: there is nothing to audit"]
    assert audit_media(tmp_path, model, DATA) == expected


def test_prompts_have_every_kind() -> None:
    rows = AllKinds()
    kinds = {kind for index in range(len(rows)) for kind, _ in json.loads(rows[index]["answer"])}
    assert kinds == {"image", "video", "audio"}
