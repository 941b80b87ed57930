"""The pictures, videos and sounds of examples, and the tiny models that learn from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from relaxd.config import DataConfig
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import read_vision
from relaxd.envs.replies import read_reply, reply_format
from relaxd.media.images import measure_image, normalise_image
from relaxd.media.sounds import normalise_sound
from relaxd.media.videos import measure_video, normalise_video
from relaxd.tools import digit_pictures, media_beginner
from relaxd.tools.digit_pictures import DigitPictures
from relaxd.tools.media_beginner import DIGITS, DOTS, Lessons, Task, make, make_zooming
from relaxd.tools.moving_dots import MovingDots
from relaxd.tools.tone_pitches import TonePitches
from relaxd.tools.zoom_pictures import HALVES, ZoomPictures, draw_wide

SOURCES: dict[str, tuple[Any, Task]] = {
    "images": (DigitPictures, DIGITS),
    "videos": (MovingDots, DOTS),
    "sounds": (TonePitches, media_beginner.PITCHES),
}


@pytest.mark.parametrize("column", SOURCES)
def test_items_are_always_the_same_ones_and_held_out_ones_are_others(column: str) -> None:
    source, task = SOURCES[column]
    items = source(40)
    rows = [items[index] for index in range(40)]
    assert rows[:5] == [source(40)[index] for index in range(5)]
    assert {row["answer"] for row in rows} == set(task.answers)
    held_out = items.held_out()
    assert not {str(row[column]) for row in rows} & {str(held_out[index][column]) for index in range(40)}


@pytest.mark.parametrize("column", SOURCES)
def test_blank_items_are_all_the_same_one_beside_the_same_answers(column: str) -> None:
    source, _ = SOURCES[column]
    blank, drawn = source(20, blank=True), source(20)
    assert [blank[index]["answer"] for index in range(20)] == [drawn[index]["answer"] for index in range(20)]
    for items in (blank, blank.held_out()):
        assert len({str(items[index][column]) for index in range(20)}) == 1


def made(folder: Path, task: Task, make: Callable[..., None] = make) -> Any:
    """Make a model, whose tokenizer must have a token for each answer; returns its rules."""
    make(folder, task, updates=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert all(len(tokenizer.encode(answer)) == 1 for answer in task.answers)
    return read_vision(folder, DataConfig(source="addition", media_keys={task.kind: "items"}))


def test_a_picture_has_four_tokens(tmp_path: Path) -> None:
    rule = made(tmp_path, DIGITS).rule
    (picture,) = DigitPictures(1)[0]["images"]
    assert measure_image(picture, rule).tokens == 4
    assert normalise_image(picture, rule).size.normal == (32, 32)  # isn't resized


def test_a_video_has_two_times_of_four_tokens(tmp_path: Path) -> None:
    rule = made(tmp_path, DOTS).video
    (video,) = MovingDots(1)[0]["videos"]
    size = measure_video(video, rule)
    assert (size.tokens, size.times, size.normal) == (8, (0.25, 1.25), (32, 32))
    assert normalise_video(video, rule).size == size


def test_a_sound_has_five_tokens(tmp_path: Path) -> None:
    rule = made(tmp_path, media_beginner.PITCHES, media_beginner.make_hearing).sound
    (tone,) = TonePitches(1)[0]["sounds"]
    assert (normalise_sound(tone, rule).size.tokens, rule.mels) == (5, media_beginner.BANDS)


def test_prompts_show_the_whole_picture_small() -> None:
    pictures, blank = ZoomPictures(20), ZoomPictures(20, blank=True)
    rows = [pictures[index] for index in range(20)]
    assert [blank[index]["answer"] for index in range(20)] == [row["answer"] for row in rows]
    assert len({blank[index]["original"] for index in range(20)}) == 1
    assert {tuple(draw_wide(index)[1]) for index in range(20)} == set(HALVES)
    held_out = pictures.held_out()
    assert not {row["original"] for row in rows} & {held_out[index]["original"] for index in range(20)}


def test_the_beginner_that_zooms_speaks_in_a_form_that_is_read(tmp_path: Path) -> None:
    make_zooming(tmp_path, updates=1)
    vision = read_vision(tmp_path)
    row = ZoomPictures(1)[0]
    assert measure_image(row["images"][0], vision.rule).tokens == 2
    tokenizer = PromptTokenizer(tmp_path, vision=vision)
    assert all(len(tokenizer.encode_text(str(digit))) == 1 for digit in range(digit_pictures.DIGITS))
    assert tokenizer.template is not None
    text, _ = Lessons().lesson()
    said = tokenizer.encode_text(text.split("<|assistant|>")[1])
    (call,) = read_reply(tokenizer, said, reply_format(tokenizer.template), []).calls
    assert call.name == "zoom"
    assert tuple(call.arguments["box"]) in HALVES
