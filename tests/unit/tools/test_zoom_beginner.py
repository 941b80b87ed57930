"""The pictures of examples/zoom.toml, and the tiny model that learns where to look."""

from pathlib import Path

from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import read_vision
from relaxd.envs.replies import read_reply, reply_format
from relaxd.media.images import measure_image
from relaxd.tools.digit_pictures import DIGITS
from relaxd.tools.zoom_beginner import Lessons, make
from relaxd.tools.zoom_pictures import HALVES, ZoomPictures, draw_wide


def test_prompts_show_the_whole_picture_small() -> None:
    pictures, blank = ZoomPictures(20), ZoomPictures(20, blank=True)
    rows = [pictures[index] for index in range(20)]
    assert [blank[index]["answer"] for index in range(20)] == [row["answer"] for row in rows]
    assert len({blank[index]["original"] for index in range(20)}) == 1
    assert {tuple(draw_wide(index)[1]) for index in range(20)} == set(HALVES)
    held_out = pictures.held_out()
    assert not {row["original"] for row in rows} & {held_out[index]["original"] for index in range(20)}


def test_the_beginner_speaks_in_a_form_that_is_read(tmp_path: Path) -> None:
    make(tmp_path, updates=1)
    vision = read_vision(tmp_path)
    row = ZoomPictures(1)[0]
    assert measure_image(row["images"][0], vision.rule).tokens == 2
    tokenizer = PromptTokenizer(tmp_path, vision=vision)
    assert all(len(tokenizer.encode_text(str(digit))) == 1 for digit in range(DIGITS))
    assert tokenizer.template is not None
    text, _ = Lessons().lesson()
    said = tokenizer.encode_text(text.split("<|assistant|>")[1])
    (call,) = read_reply(tokenizer, said, reply_format(tokenizer.template), []).calls
    assert call.name == "zoom"
    assert tuple(call.arguments["box"]) in HALVES
