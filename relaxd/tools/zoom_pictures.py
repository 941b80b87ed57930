"""Source of prompts of examples/zoom.toml: wide pictures with a digit in one half, which prompts show small."""

from random import Random
from typing import Any

from PIL import Image

from relaxd.tools.digit_pictures import GREY, SIDE, draw, encoded
from relaxd.tools.drawn_prompts import DrawnPrompts

PROMPT = "<image>Which digit is this?"
HALVES = ((0, 0, 500, 1000), (500, 0, 1000, 1000))
"""The parts of a picture that may have the digit, as the tool `zoom` wants them."""
SHOWN = (SIDE, SIDE // 2)
"""Width and height of a picture in a prompt, in pixels: half as wide and high as it is."""


class ZoomPictures(DrawnPrompts):
    """A source of prompts, each with a small picture, and the whole one in the column "original"."""

    def __init__(self, count: int = 5000, blank: bool = False, first: int = 0) -> None:
        """Make a source, by default of more prompts than others have."""
        super().__init__(count, blank, first)

    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return a row. If it is blank, the whole picture is grey, so that the tool shows nothing."""
        digit, _, picture = draw_wide(seed)
        small = encoded(picture.resize(SHOWN))
        if blank:
            picture = Image.new("RGB", picture.size, (GREY, GREY, GREY))
        return {"prompt": PROMPT, "answer": str(digit), "images": [small], "original": encoded(picture)}


def draw_wide(seed: int) -> tuple[int, tuple[int, ...], Image.Image]:
    """Return a random digit, the half that it is in, and a picture of it."""
    digit, picture = draw(seed)
    half = Random(f"half {seed}").randrange(len(HALVES))
    wide = Image.new("RGB", (2 * SIDE, SIDE))
    wide.paste(picture, (half * SIDE, 0))
    return digit, HALVES[half], wide
