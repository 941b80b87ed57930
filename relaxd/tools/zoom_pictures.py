"""Prompt source of examples/zoom.toml: wide pictures with a digit in one half, shown small in prompts."""

from random import Random
from typing import Any

from PIL import Image

from relaxd.tools.digit_pictures import GREY, SIDE, DrawnPrompts, draw, encoded

PROMPT = "<image>Which digit is this?"
HALVES = ((0, 0, 500, 1000), (500, 0, 1000, 1000))
"""Halves of a picture that can contain the digit, as arguments of the tool `zoom`."""
SHOWN = (SIDE, SIDE // 2)
"""Width and height of a picture in a prompt, in pixels: half of the original picture's."""


class ZoomPictures(DrawnPrompts):
    """Prompt source whose rows have a small picture, and the full-size picture in the column "original"."""

    def __init__(self, count: int = 5000, blank: bool = False, first: int = 0) -> None:
        """Create a prompt source. The arguments are those of DrawnPrompts; only the default of `count` is higher."""
        super().__init__(count, blank, first)

    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return the prompt row for a seed.

        With `blank`, the original picture is grey, so that the tool shows no digit.
        """
        digit, _, picture = draw_wide(seed)
        small = encoded(picture.resize(SHOWN))
        if blank:
            picture = Image.new("RGB", picture.size, (GREY, GREY, GREY))
        return {"prompt": PROMPT, "answer": str(digit), "images": [small], "original": encoded(picture)}


def draw_wide(seed: int) -> tuple[int, tuple[int, ...], Image.Image]:
    """Return a random digit, the half of the picture that contains it, and the picture."""
    digit, picture = draw(seed)
    half = Random(f"half {seed}").randrange(len(HALVES))
    wide = Image.new("RGB", (2 * SIDE, SIDE))
    wide.paste(picture, (half * SIDE, 0))
    return digit, HALVES[half], wide
