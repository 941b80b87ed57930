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
"""Number of prompts held out for evaluation. Their seeds follow those of the training prompts."""


class DrawnPrompts(ABC):
    """Prompt source (docs/data.md, "A source of your own") that computes a picture, video or sound for each prompt."""

    def __init__(self, count: int = 2500, blank: bool = False, first: int = 0) -> None:
        """Create a prompt source.

        Args:
            count: number of prompts.
            blank: True to replace the part of a picture, video or sound that shows the answer by grey or silence.
            first: seed of the first prompt.
        """
        self._count, self._blank, self._first = count, blank, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the data row of the prompt at `index`."""
        return self.row(self._first + index, blank=self._blank)

    def held_out(self) -> Self:
        """Return a source of other prompts, for evaluation."""
        return type(self)(HELD_OUT, self._blank, self._first + self._count)

    @abstractmethod
    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return the data row of the prompt that is drawn from `seed`."""


PROMPT = "<image>Which digit is this?"
DIGITS = 5
"""Number of different digits in the pictures; few, because lucky guesses speed up learning."""
SIDE = 32
"""Width and height of a picture, in pixels."""
SIZES = (26, 30)
"""Minimum and maximum font size of the drawn digits, in pixels; the maximum is excluded."""
GREY = 128


class DigitPictures(DrawnPrompts):
    """Prompt source whose prompts show a picture of a digit and ask which it is."""

    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return the data row of a prompt: prompt, answer, and the picture in the column "images"."""
        digit, picture = draw(seed)
        if blank:
            picture = Image.new("RGB", picture.size, (GREY, GREY, GREY))
        return {"prompt": PROMPT, "answer": str(digit), "images": [encoded(picture)]}


def draw(seed: int) -> tuple[int, Image.Image]:
    """Draw a random digit in random size, place, slant and colours. Returns the digit and the picture."""
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
    """Return Pillow's default font in a size. Cached, because Pillow would read the font's file for each digit."""
    return cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))


def encoded(picture: Image.Image) -> str:
    """Return a picture as a PNG in base64, so that it fits into JSON."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
