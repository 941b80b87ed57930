"""Prompt source of examples/digits.toml: pictures of the digits 0 to 4; the answer is the digit.

Pictures are drawn with Pillow and its bundled font, so that nothing is downloaded.
"""

import base64
import io
from abc import ABC, abstractmethod
from functools import lru_cache
from random import Random
from typing import Any, Self, cast

from PIL import Image, ImageDraw, ImageFont

HELD_OUT = 200
"""Number of held-out prompts. Their seeds follow those of the training prompts."""


class DrawnPrompts(ABC):
    """Prompt source (docs/data.md, "A source of your own") that computes a picture, video or sound for each prompt."""

    def __init__(self, count: int = 2500, blank: bool = False, first: int = 0) -> None:
        """Make a source.

        Args:
            count: number of prompts.
            blank: True to replace the part that shows the answer with grey, or with silence.
            first: seed of the first prompt.
        """
        self._count, self._blank, self._first = count, blank, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        return self.row(self._first + index, blank=self._blank)

    def held_out(self) -> Self:
        """Return different prompts for evaluation."""
        return type(self)(HELD_OUT, self._blank, self._first + self._count)

    @abstractmethod
    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return the data row for a seed."""


PROMPT = "<image>Which digit is this?"
DIGITS = 5
"""Number of different digits, small because lucky guesses speed up learning."""
SIDE = 32
"""Width and height of a picture, in pixels."""
SIZES = (26, 30)
"""Range of the sizes of digits, in pixels."""
GREY = 128


class DigitPictures(DrawnPrompts):
    """A source of prompts, each with a picture of a digit."""

    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return a row. The picture's column is "images"."""
        digit, picture = draw(seed)
        if blank:
            picture = Image.new("RGB", picture.size, (GREY, GREY, GREY))
        return {"prompt": PROMPT, "answer": str(digit), "images": [encoded(picture)]}


def draw(seed: int) -> tuple[int, Image.Image]:
    """Return a random digit and a picture of it in random size, place, slant and colors."""
    random = Random(seed)
    digit = random.randrange(DIGITS)
    ground = tuple(random.randrange(0, 60) for _ in range(3))
    ink = tuple(random.randrange(195, 256) for _ in range(3))
    picture = Image.new("RGB", (SIDE, SIDE), ground)
    font = font_of(random.randrange(*SIZES))
    centre = (SIDE / 2 + random.uniform(-1.5, 1.5), SIDE / 2 + random.uniform(-1.5, 1.5))
    ImageDraw.Draw(picture).text(centre, str(digit), ink, font, anchor="mm")
    return digit, picture.rotate(random.uniform(-6, 6), Image.Resampling.BICUBIC, fillcolor=ground)


@lru_cache
def font_of(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's default font, cached because Pillow would read its file again for each digit."""
    return cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))


def encoded(picture: Image.Image) -> str:
    """Return a picture as base64 of a PNG, a form that JSON can hold."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
