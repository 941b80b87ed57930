"""Source of prompts of examples/digits.toml: pictures of the digits 0 to 4, and the digit as the answer.

They are drawn with Pillow and the font that it brings, so that nothing is downloaded.
"""

import base64
import io
from functools import lru_cache
from random import Random
from typing import Any, cast

from PIL import Image, ImageDraw, ImageFont

from relaxd.tools.drawn_prompts import DrawnPrompts

PROMPT = "<image>Which digit is this?"
DIGITS = 5
"""Number of different digits. With fewer, guesses that are right by chance speed learning up."""
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
    """Return a picture as base64 of a PNG, which is a form of an image that JSON has, too."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
