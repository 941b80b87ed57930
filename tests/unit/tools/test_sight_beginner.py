"""The pictures of examples/digits.toml, and the tiny model that learns to read them."""

from pathlib import Path

from transformers import AutoTokenizer

from relaxd.data.vision import read_vision
from relaxd.media import measure_image, normalise_image
from relaxd.tools.digit_pictures import DIGITS, DigitPictures
from relaxd.tools.digits_beginner import make


def test_pictures_are_always_the_same_ones_and_held_out_ones_are_others() -> None:
    pictures = DigitPictures(40)
    rows = [pictures[index] for index in range(40)]
    assert rows[:5] == [DigitPictures(40)[index] for index in range(5)]
    assert {row["answer"] for row in rows} == {str(digit) for digit in range(DIGITS)}
    held_out = pictures.held_out()
    assert not {tuple(row["images"]) for row in rows} & {tuple(held_out[index]["images"]) for index in range(40)}


def test_blank_pictures_are_all_the_same_one_beside_the_same_answers() -> None:
    blank, drawn = DigitPictures(20, blank=True), DigitPictures(20)
    assert [blank[index]["answer"] for index in range(20)] == [drawn[index]["answer"] for index in range(20)]
    for pictures in (blank, blank.held_out()):
        assert len({tuple(pictures[index]["images"]) for index in range(20)}) == 1


def test_the_beginner_has_a_token_for_each_digit_and_four_for_a_picture(tmp_path: Path) -> None:
    make(tmp_path, updates=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert all(len(tokenizer.encode(str(digit))) == 1 for digit in range(DIGITS))
    vision = read_vision(tmp_path)
    (picture,) = DigitPictures(1)[0]["images"]
    assert measure_image(picture, vision.rule).tokens == 4
    assert normalise_image(picture, vision.rule).size.normal == (32, 32)  # isn't resized
