"""The tool that shows parts of pictures."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, Step
from relaxd.envs.tool_calls import ToolCall
from relaxd.envs.zoom import Zoom
from relaxd.media.images import ORIENTATION
from relaxd.media.sources import data_uri
from tests.kit.vision import encoded, picture

WHOLE = picture(200, 100)
SHOWN = {"type": "image", "image": data_uri(encoded(WHOLE.resize((50, 25))))}
ASKED = [{"role": "user", "content": [SHOWN, {"type": "text", "text": "What?"}]}]
ORIGINAL = {"original": base64.b64encode(encoded(WHOLE)).decode()}


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
