"""The tool that shows parts of pictures."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from relaxd.config import DataConfig
from relaxd.config.load_toml import load_file
from relaxd.data.dataset import load_data
from relaxd.data.vision import normalise_shown, read_vision
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, Step, ToolCall
from relaxd.envs.observation_media import with_media
from relaxd.envs.zoom import Zoom
from relaxd.media.images import ORIENTATION
from relaxd.media.placeholders import IMAGE
from relaxd.media.sources import data_uri
from tests.kit.vision import encoded, picture, write_vision_model

WHOLE = picture(200, 100)
SHOWN = {"type": "image", "image": data_uri(encoded(WHOLE.resize((50, 25))))}
ASKED = [{"role": "user", "content": [SHOWN, {"type": "text", "text": "What?"}]}]
BYTES = encoded(WHOLE)
ORIGINAL = {"original": base64.b64encode(BYTES).decode()}
RUN = """
run.steps = 1
model.path = "model"
reward.name = "dummy"
[data]
source = "files"
path = "rows.parquet"
media_keys = { image = "images" }
max_image_tokens = 8
"""
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": ({"images": [encoded(WHOLE.resize((50, 25)))], "large": BYTES}, "large"),
    "objects with bytes": ({"images": [{"bytes": BYTES, "path": "a.png"}]}, "images"),
    "one item": ({"images": {"bytes": BYTES}}, "images"),
    "a part": ({"images": [{"type": "image", "image": BYTES}]}, "images"),
    "a path": ({"images": [{"bytes": None, "path": "whole.png"}]}, "images"),
    "base64": ({"images": [ORIGINAL["original"]]}, "images"),
}
"""Columns of a row with a picture, and the column with the whole one."""


def zoomed(tool: Zoom, box: Any) -> Any:
    """Return what the tool answers to a call: a text, or the picture that it shows."""
    step = tool.step(Reply("", [ToolCall("zoom", {"box": box}, id="c1")]))
    assert isinstance(step, Step)
    message: Any = next(iter(step.observation or []))
    assert message["role"] == "tool"
    content = message["content"]
    return content if isinstance(content, str) else content[0]["image"]


def test_a_part_is_cut_out_of_the_whole_picture_and_enlarged() -> None:
    tool = Zoom()
    tool.open(Sample(ASKED, metadata=ORIGINAL))
    part = zoomed(tool, [500, 0, 1000, 400])
    np.testing.assert_array_equal(np.asarray(part), np.asarray(WHOLE)[:40, 100:])
    tool = Zoom(min_side=150)
    tool.open(Sample(ASKED, metadata=ORIGINAL))
    assert zoomed(tool, [500, 0, 1000, 400]).size == (150, 60)
    assert zoomed(tool, [0, 0, 1000, 1000]).size == (200, 100)
    end = tool.step(Reply("A bird."))
    assert isinstance(end, Step)
    assert (end.done, end.info) == (True, {"calls": 2.0, "errors": 0.0})


def test_a_picture_is_turned_upright_first(tmp_path: Path) -> None:
    lying = Image.Exif()
    lying[ORIENTATION] = 6
    WHOLE.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.png", exif=lying)
    tool = Zoom()
    tool.open(Sample(ASKED, metadata={"original": str(tmp_path / "a.png")}))
    np.testing.assert_array_equal(np.asarray(zoomed(tool, [500, 0, 1000, 1000])), np.asarray(WHOLE)[:, 100:])


@pytest.mark.parametrize(("columns", "key"), ROWS.values(), ids=ROWS)
def test_a_part_is_cut_out_of_the_picture_in_a_parquet_file(
    columns: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt comes as the agent service gets it, in JSON."""
    monkeypatch.chdir(tmp_path)
    write_vision_model(Path("model"))
    Path("whole.png").write_bytes(BYTES)
    pa.parquet.write_table(pa.Table.from_pylist([{"prompt": "<image>What?", **columns}]), "rows.parquet")
    Path("run.toml").write_text(RUN)
    prompt = load_data(load_file(Path("run.toml"), [f"--data.original_key={key}"])).train.prompt(0)
    sent = json.loads(json.dumps(prompt.to_json()))
    messages = with_media(sent["messages"], [item.uri for item in prompt.media.items()])
    tool = Zoom()
    tool.open(Sample(messages, metadata=sent["metadata"]))
    np.testing.assert_array_equal(np.asarray(zoomed(tool, [500, 0, 1000, 400])), np.asarray(WHOLE)[:40, 100:])
    tool.open(Sample(messages))
    assert zoomed(tool, [0, 0, 1000, 1000]).width < WHOLE.width


def test_a_part_may_have_as_many_tokens_as_the_whole_picture(tmp_path: Path) -> None:
    """So that the limit of the prompt's images leaves it more detail: twice as much on each side of a quarter."""
    write_vision_model(tmp_path)
    limits = DataConfig(source="addition", media_keys={"image": "images"}, max_image_tokens=64)
    vision, tool = read_vision(tmp_path, limits), Zoom()
    tool.open(Sample(ASKED, metadata={"original": data_uri(encoded(picture(1024, 1024)))}))
    for edge, scale in ((1000, 0.25), (500, 0.5), (250, 1.0)):
        part = zoomed(tool, [0, 0, edge, edge])
        grid = normalise_shown(IMAGE, encoded(part), vision).size.grid
        assert grid == (1, 16, 16)  # 64 tokens of 2 x 2 patches of 16 pixels
        assert 16 * 16 / part.width == scale


def test_without_a_whole_picture_parts_are_those_of_the_prompts() -> None:
    tool = Zoom()
    tool.open(Sample(ASKED))
    assert zoomed(tool, [0, 0, 1000, 1000]).size == (50, 25)


@pytest.mark.parametrize(
    ("box", "complaint"),
    [
        ([0, 0, 500], "it must be [left, upper, right, lower], from 0 to 1000"),
        ([500, 0, 100, 1000], "it must be [left, upper, right, lower]"),
        ([0, 0, 1001, 1000], "it must be [left, upper, right, lower]"),
        ([0, 0, 20, 1000], "4 x 100 pixels: each side must have 8"),
        (["left", 0, 1, 1], "box.0: Input should be a valid number"),
    ],
)
def test_boxes_that_are_none_are_answered(box: Any, complaint: str) -> None:
    tool = Zoom()
    tool.open(Sample(ASKED, metadata=ORIGINAL))
    answer = zoomed(tool, box)
    assert answer.startswith("Error: ")
    assert complaint in answer


@pytest.mark.parametrize(
    ("messages", "metadata", "complaint"),
    [
        ([{"role": "user", "content": "What?"}], {}, 'the prompt has no image, and its data no column "original"'),
        (ASKED, {"original": "/no/a.png"}, "column \"original\": the picture is '/no/a.png', which is no file here"),
        (ASKED, {"original": data_uri(b"x" * 99)}, 'column "original": the picture is no image in a format'),
    ],
)
def test_pictures_that_cannot_be_read_are_refused(messages: Any, metadata: Any, complaint: str) -> None:
    with pytest.raises(BadEnvironmentError) as refused:
        Zoom().open(Sample(messages, metadata=metadata))
    assert complaint in str(refused.value)


def test_a_bomb_is_not_decoded() -> None:
    bomb = data_uri(encoded(Image.new("1", (7000, 7000))))
    with pytest.raises(BadEnvironmentError, match="7000 x 7000 pixels: at most 33,554,432 are decoded"):
        Zoom().open(Sample(ASKED, metadata={"original": bomb}))
